"""`linear_logprob` reads logit scales and softcaps the way transformers' own heads do."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from typing import Any

import pytest
import torch
from tests.ops.eager_logprob import eager_scores

from ratoon.ops import linear_logprob

V = 101
TINY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def build(family: str) -> tuple[Any, dict[str, Any]]:
    """A random one-layer model, and how its head is written for linear_logprob."""
    import transformers as tf

    torch.manual_seed(0)
    match family:
        case "cohere":
            config = tf.CohereConfig(**TINY, logit_scale=0.3)
            return tf.CohereForCausalLM(config), {"logit_scale": 0.3}
        case "granite":
            config = tf.GraniteConfig(**TINY, logits_scaling=3.0)
            return tf.GraniteForCausalLM(config), {"logit_scale": 1 / 3.0}
        case "gemma2":
            config = tf.Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=0.5)
            return tf.Gemma2ForCausalLM(config), {"logit_softcap": 0.5}
        case "llama":
            return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY)), {}
    raise AssertionError(f"no model for {family}")


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "llama"])
def test_same_logits_as_the_model(family: str):
    """Log-probs and entropy at temperature 0.7 from the model's logits, and from its last hidden states."""
    model, head_options = build(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)  # spread the logits out, into the cap's bend
        token_ids_BT = torch.randint(1, V, (1, 9), generator=torch.Generator().manual_seed(1))
        logits_MV = model(token_ids_BT).logits[0, :-1]
        hidden_MC = model.model(token_ids_BT).last_hidden_state[0, :-1]
        target_M = token_ids_BT[0, 1:]
        expected = eager_scores(logits_MV.float() / 0.7, target_M)
        got = linear_logprob(hidden_MC, model.get_output_embeddings().weight, target_M, temperature=0.7, **head_options)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # Without its option the family's head would be another one.
    if head_options:
        plain = linear_logprob(hidden_MC, model.get_output_embeddings().weight, target_M, temperature=0.7)
        assert (plain[0] - expected[0]).abs().max() > 0.01
