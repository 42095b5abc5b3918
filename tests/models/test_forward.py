"""Log-probs and entropies of scored tokens."""

# Shape letters: M scored tokens, V vocabulary.

from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ratoon.layout import PackedLayout, pack_documents, pack_groups, pack_sequences
from ratoon.models import attach, forward_logprobs, stock_attention
from ratoon.types import Prompt, Response, RolloutGroup, SampledSupport

torch.set_num_threads(1)

SEQUENCES = [[5, 6, 7, 8, 9], [5, 6, 7, 20], [30, 31], [4]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_temperature_divides_the_logits_that_sampling_sees(name: str, temperature: float):
    """Scaled (Cohere, Granite) and capped (Gemma 2) logits are what a sampler divides by the temperature."""
    model = attach(build_model(name))
    with torch.no_grad():
        logprobs_M, entropy_M = forward_logprobs(model, pack_sequences(SEQUENCES), temperature)
        done = 0
        with stock_attention(model, "eager"):
            for sequence in SEQUENCES:
                ids = torch.tensor([sequence])
                all_logprobs_MV = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
                part = slice(done, done + len(sequence) - 1)
                expected_M = all_logprobs_MV.gather(1, ids[0, 1:, None])[:, 0]
                torch.testing.assert_close(logprobs_M[part], expected_M, rtol=0, atol=1e-5)
                expected_entropy_M = -(all_logprobs_MV.exp() * all_logprobs_MV).sum(-1)
                torch.testing.assert_close(entropy_M[part], expected_entropy_M, rtol=0, atol=1e-5)
                done = part.stop
    assert done == logprobs_M.shape[0]


def kept_of(layout: PackedLayout, seed: int = 0) -> SampledSupport:
    """Each scored token among itself and up to 20 others."""
    rng = np.random.default_rng(seed)
    others = [rng.choice(VOCAB_SIZE, rng.integers(0, 20), replace=False) for _ in layout.target_M]
    pairs = zip(others, layout.target_M, strict=True)
    return SampledSupport.of([np.union1d(ids, [target]).astype(np.int32) for ids, target in pairs])


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite"])
def test_a_support_renormalises_what_the_model_says(name: str):
    """Log-softmax over the kept tokens of the model's own logits, scaled (Cohere, Granite) and capped (Gemma 2) before
    the temperature; the gradient reaches every weight as it does through the full logits."""
    model = attach(build_model(name))
    layout = pack_sequences(SEQUENCES)
    support = kept_of(layout)
    logprobs_M, entropy_M = forward_logprobs(model, layout, 0.7, support=support)
    (logprobs_M.sum() + 0.3 * entropy_M.sum()).backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    rows: list[torch.Tensor] = []
    with stock_attention(model, "eager"):
        for sequence in SEQUENCES:
            rows.append(model(input_ids=torch.tensor([sequence])).logits[0, :-1] / 0.7)
    logits_MV = torch.cat(rows)
    left_out_MV = torch.ones_like(logits_MV, dtype=torch.bool)
    for row, ids in enumerate(np.split(support.token_ids, support.offsets[1:-1])):
        left_out_MV[row, ids.tolist()] = False
    expected_MV = logits_MV.masked_fill(left_out_MV, -torch.inf).log_softmax(-1)
    expected_M = expected_MV.gather(1, torch.tensor(layout.target_M)[:, None])[:, 0]
    expected_entropy_M = -(expected_MV.exp() * expected_MV.masked_fill(left_out_MV, 0)).sum(-1)
    torch.testing.assert_close(logprobs_M, expected_M, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_M, expected_entropy_M, rtol=0, atol=1e-5)
    (expected_M.sum() + 0.3 * expected_entropy_M.sum()).backward()
    for got, parameter in zip(ours, model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=2e-4)


def test_a_support_of_other_tokens_is_refused():
    model = attach(build_model("llama"))
    layout = pack_sequences(SEQUENCES)
    fewer = SampledSupport.of([np.array([5], np.int32)])
    for given in (layout, pack_groups([])):
        with pytest.raises(ValueError, match=rf"support is of 1 tokens, the layout scores {given.num_scored}"):
            forward_logprobs(model, given, support=fewer)
    assert forward_logprobs(model, pack_groups([]), support=SampledSupport.of([]))[0].shape == (0,)


@pytest.mark.parametrize(
    "layout",
    [
        pack_groups([]),
        pack_documents([[4], []]),
        pack_groups([RolloutGroup(Prompt("p", np.arange(3, 7)), (Response(np.empty(0, np.int64)),))]),
    ],
)
def test_nothing_to_score(layout: PackedLayout):
    model = attach(build_model("llama", dtype=torch.bfloat16))
    for result_M in forward_logprobs(model, layout):
        assert result_M.shape == (0,)
        assert result_M.dtype == torch.float32


@pytest.mark.parametrize("bad", [[3, 4, VOCAB_SIZE], [VOCAB_SIZE, 4, 3]])
def test_tokens_outside_the_vocabulary(bad: list[int]):
    model = attach(build_model("llama"))
    with pytest.raises(ValueError, match=f"token id {VOCAB_SIZE} is outside the model's vocabulary of {VOCAB_SIZE}"):
        forward_logprobs(model, pack_documents([bad]))


@pytest.mark.parametrize("layout", [None, [[3, 4]], np.arange(3)])
def test_what_is_no_layout(layout: object):
    with pytest.raises(ValueError, match=r"layout must be a PackedLayout, got .*pack_groups"):
        forward_logprobs(attach(build_model("llama")), layout)  # pyright: ignore[reportArgumentType]


def test_sequences_past_the_learned_positions():
    sizes: dict[str, Any] = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    model = attach(GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)))
    assert forward_logprobs(model, pack_documents([[1] * 16]))[0].isfinite().all()
    with pytest.raises(
        ValueError, match=r"17 tokens is longer than the 16 positions that GPT2Model has learned \(wpe\)"
    ):
        forward_logprobs(model, pack_documents([[1] * 17]))


def test_windows_are_of_positions_not_of_rows():
    """A response stored far from its prompt still sees the prompt's end."""
    model = attach(build_model("mistral"))
    prompt = Prompt("p", np.arange(3, 9))
    responses = tuple(Response(np.arange(10, 10 + length)) for length in (9, 7, 2))
    last = RolloutGroup(prompt, responses[2:])
    with torch.no_grad():
        together, _ = forward_logprobs(model, pack_groups([RolloutGroup(prompt, responses)]))
        alone, _ = forward_logprobs(model, pack_groups([last]))
    torch.testing.assert_close(together[-2:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_routers_own_loss_takes_no_part(name: str):
    """unsloth#6904: without an auxiliary loss on the shared path, a configuration that asks for one ended in an error.
    verl#6836, Megatron-LM#1984: one of the wrong size, by sharding or padding. None is computed here."""
    layout = pack_sequences(SEQUENCES)
    plain, asking = build_model(name), build_model(name)
    asking.config.update({"output_router_logits": True, "router_aux_loss_coef": 1e6})
    gradients = []
    for model in (attach(plain), attach(asking)):
        logprobs_M, _ = forward_logprobs(model, layout)
        logprobs_M.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_another_function_under_our_name_is_noticed():
    model = attach(build_model("llama"))
    layout = pack_documents([[1, 2, 3]])
    ours = ALL_ATTENTION_FUNCTIONS["ratoon"]
    AttentionInterface.register("ratoon", ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        with pytest.raises(ValueError, match="registered with transformers under our name 'ratoon'"):
            forward_logprobs(model, layout)
    finally:
        AttentionInterface.register("ratoon", ours)
    forward_logprobs(model, layout)
