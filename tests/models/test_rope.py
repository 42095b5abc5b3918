"""Rotary scalings that follow the batch are fixed for the run."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from ratoon.layout import pack_documents
from ratoon.models import attach, fix_rope, forward_logprobs, stock_attention
from ratoon.types import UserError

TINY: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.5,
}
ORIGINAL = 16


def build(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "dynamic":
            rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
            return LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=ORIGINAL, rope_parameters=rope))
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        }
        lengths: dict[str, Any] = {
            "max_position_embeddings": 4 * ORIGINAL,
            "original_max_position_embeddings": ORIGINAL,
        }
        return Phi3ForCausalLM(Phi3Config(**TINY, **lengths, pad_token_id=0, eos_token_id=1, rope_parameters=rope))


SHORT, LONG = list(range(3, 11)), [3 + index % 15 for index in range(40)]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refused_unless_fixed(kind: str):
    model = build(kind)
    with pytest.raises(UserError, match=f"{kind} takes its frequencies from the longest sequence"):
        attach(model)
    attach(fix_rope(model, 40))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_companion_does_not_move_a_short_sequence(kind: str):
    model = attach(fix_rope(build(kind), 40))
    alone, _ = forward_logprobs(model, pack_documents([SHORT]))
    together, _ = forward_logprobs(model, pack_documents([SHORT, LONG]))
    torch.testing.assert_close(together[: len(SHORT) - 1], alone, rtol=0, atol=1e-5)

    stock = build(kind).eval()
    with torch.no_grad():
        expected = stock(input_ids=torch.tensor([LONG])).logits
        short_frequencies = stock(input_ids=torch.tensor([SHORT])).logits
        with stock_attention(model, "eager"):
            torch.testing.assert_close(model(input_ids=torch.tensor([LONG])).logits, expected)
            fixed = model(input_ids=torch.tensor([SHORT])).logits
    assert float((fixed - short_frequencies).abs().max()) > 1e-3  # the scaling acts on these lengths


def test_other_scalings_stay_as_they_are():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    frequencies = model.model.rotary_emb.inv_freq.clone()
    fix_rope(model, 1_000_000)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        fix_rope(model, 0)
