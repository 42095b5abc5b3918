"""The runner of our kernels against the one in torch's operations: the same tokens, in the same cache."""

# Shape letters: P prompt tokens, B rows that decode.

import dataclasses

import numpy as np
import pytest
import torch
from tests.rollout.paged.moe import SIZES
from tests.rollout.tiny import VOCAB, tiny_qwen3
from tests.sampling import sampled
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from ratoon.models import attach
from ratoon.rollout.draws import response_key
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.experts import why_not_recorded
from ratoon.rollout.engines.paged.kernel_runner import KernelRunner
from ratoon.rollout.engines.paged.runner import DecodeRows, Draws, Prefilled, PrefillPiece, Runner
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK = 16
PROMPTS = (5, 40, 1)
MEMBERS = (3, 1, 2)
OWN_BLOCKS = 2


def twin(model: PreTrainedModel, device: str) -> PreTrainedModel:
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    return twin_of(attach(model), BLOCK_ATTENTION)


def tables() -> tuple[list[list[int]], list[list[int]]]:
    """Blocks of each prompt and of each response."""
    numbers = iter(np.random.default_rng(0).permutation(64).tolist())
    prompts = [[next(numbers) for _ in range(-(-P // BLOCK))] for P in PROMPTS]
    return prompts, [[next(numbers) for _ in range(OWN_BLOCKS)] for _ in range(sum(MEMBERS))]


def prefilled(runner: Runner) -> Prefilled:
    prompts, _ = tables()
    rng = np.random.default_rng(1)
    runner.resize(64)
    pieces = [
        PrefillPiece(rng.integers(0, VOCAB, P), blocks, P, wants_logits=True)
        for P, blocks in zip(PROMPTS, prompts, strict=True)
    ]
    return runner.prefill(pieces)


def prefill(runner: Runner) -> torch.Tensor:
    return prefilled(runner).logits_UV


def first_rows(token_B: np.ndarray) -> DecodeRows:
    prompts, own = tables()
    table_UX = np.zeros((len(PROMPTS), max(map(len, prompts))), np.int32)
    for row_X, blocks in zip(table_UX, prompts, strict=True):
        row_X[: len(blocks)] = blocks
    return DecodeRows(
        token_B=token_B,
        prompt_of_B=np.repeat(np.arange(len(MEMBERS)), MEMBERS).astype(np.int32),
        prompt_table_UX=table_UX,
        num_prompt_keys_U=np.array(PROMPTS, np.int32),
        own_table_BX=np.array(own, np.int32),
        # The keys before hold zeros, in every cache.
        num_own_keys_B=np.full(sum(MEMBERS), BLOCK - 2, np.int32),
    )


def make_draws(temperatures: tuple[float, ...], num_drawn: int) -> Draws:
    keys = [response_key(3, 0, "p", index) for index in range(sum(MEMBERS))]
    return Draws(np.array(keys, np.uint64), np.full(len(keys), num_drawn, np.int64), np.resize(temperatures, len(keys)))


def qwen3() -> PreTrainedModel:
    config = tiny_qwen3().config
    config.update({"attention_dropout": 0.0, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    gemma2 = Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=9, attn_logit_softcapping=4.0))
    oss = GptOssForCausalLM(GptOssConfig(**SIZES, sliding_window=8, num_local_experts=4, num_experts_per_tok=2))
    return {"qwen3": qwen3(), "windows, softcap": gemma2, "windows, sinks": oss}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sampled("windows, sinks", "qwen3", "windows, softcap"))
def test_logits_are_those_of_plain_operations(device: str, name: str):
    model = twin(models()[name], device)
    ours, plain = KernelRunner(model, 8, BLOCK), TorchRunner(model, BLOCK)
    got_UV, want_UV = prefill(ours), prefill(plain)
    torch.testing.assert_close(got_UV, want_UV, rtol=1e-4, atol=1e-4)
    rows = first_rows(np.arange(sum(MEMBERS)))
    for step in range(2):
        got_BV, want_BV = ours.decode(rows).logits_BV, plain.decode(rows).logits_BV
        torch.testing.assert_close(got_BV, want_BV, rtol=1e-4, atol=1e-4)
        rows = rows.followed_by(np.arange(sum(MEMBERS)) + 7 * step)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_drawn_together_are_those_drawn_in_turn(device: str):
    """Across blocks, for greedy and sampled rows, and again for fewer rows and other lengths in the same buffers."""
    model = twin(qwen3(), device)
    ours, plain = KernelRunner(model, 8, BLOCK, steps_together=4), TorchRunner(model, BLOCK)
    prefill(ours)
    prefill(plain)
    rows, num_drawn = first_rows(np.arange(sum(MEMBERS))), 1
    for num_steps in (4, 2):
        draws = make_draws((0.0, 1.0, 0.7), num_drawn)
        got, want = ours.draw(rows, draws, num_steps), plain.draw(rows, draws, num_steps)
        assert got.token_SB.tolist() == want.token_SB.tolist()
        np.testing.assert_allclose(got.logprob_SB, want.logprob_SB, rtol=0, atol=1e-4)
        rows = dataclasses.replace(rows, token_B=want.token_SB[-1], num_own_keys_B=rows.num_own_keys_B + num_steps)
        num_drawn += num_steps
    # Only the last prompt's responses go on.
    fewer = dataclasses.replace(
        rows,
        token_B=rows.token_B[4:],
        prompt_of_B=np.zeros(2, np.int32),
        prompt_table_UX=rows.prompt_table_UX[2:],
        num_prompt_keys_U=rows.num_prompt_keys_U[2:],
        own_table_BX=rows.own_table_BX[4:],
        num_own_keys_B=rows.num_own_keys_B[4:],
    )
    draws = Draws(*(x[4:] for x in dataclasses.astuple(make_draws((1.0,), num_drawn))))
    got, want = ours.draw(fewer, draws, 1), plain.draw(fewer, draws, 1)
    assert got.token_SB.tolist() == want.token_SB.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_its_room_gets_more(device: str):
    model = twin(qwen3(), device)
    ours, plain = KernelRunner(model, 2, BLOCK), TorchRunner(model, BLOCK)
    prefill(ours)
    prefill(plain)
    rows = first_rows(np.arange(sum(MEMBERS)))
    torch.testing.assert_close(ours.decode(rows).logits_BV, plain.decode(rows).logits_BV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_new_weights_are_read(device: str):
    """Those written in place, and others in place of them."""
    model = twin(qwen3(), device)
    ours, plain = KernelRunner(model, 8, BLOCK), TorchRunner(model, BLOCK)
    prefill(ours)
    prefill(plain)
    rows = first_rows(np.arange(sum(MEMBERS)))
    assert ours.decode(rows).logits_BV.shape == plain.decode(rows).logits_BV.shape
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    ours.weights_changed()
    torch.testing.assert_close(ours.decode(rows).logits_BV, plain.decode(rows).logits_BV, rtol=1e-4, atol=1e-4)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 0.5)
    ours.weights_changed()
    torch.testing.assert_close(ours.decode(rows).logits_BV, plain.decode(rows).logits_BV, rtol=1e-4, atol=1e-4)


def tiny_mixture(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(5)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        # Without graphs, and in them.
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_routes_are_those_of_plain_operations(device: str, dtype: torch.dtype):
    """Of prefilled, drawn and decoded tokens, and of no padding.

    In bfloat16 rounding chooses among experts that are as good as equal: few tokens may differ, while a row or a step
    too far would change most.
    """
    model = twin(tiny_mixture(dtype), device)
    if device == "cuda":
        assert (why_not_recorded(model) is None) == (dtype == torch.bfloat16)
    ours = KernelRunner(model, 8, BLOCK, steps_together=4, returns_routes=True)
    plain = TorchRunner(model, BLOCK, returns_routes=True)
    got, want = prefilled(ours).routes, prefilled(plain).routes
    assert got is not None and want is not None
    assert [tuple(routes_TLK.shape) for routes_TLK in got] == [(P, 2, 2) for P in PROMPTS]
    is_same = [(a == b).cpu().numpy().ravel() for a, b in zip(got, want, strict=True)]
    rows = first_rows(np.arange(sum(MEMBERS)))
    for num_drawn in (1, 3)[
        : 1 if device == "cpu" else 2
    ]:  # the second time in the same buffers; interpreters are slow
        draws = make_draws((0.0,), num_drawn)
        mine, theirs = ours.draw(rows, draws, 2).routes_SBLK, plain.draw(rows, draws, 2).routes_SBLK
        assert mine is not None and theirs is not None and mine.shape == (2, sum(MEMBERS), 2, 2)
        # The second step reads what the first one drew, and rounding chooses there too.
        num_alike = 2 if dtype == torch.float32 else 1
        is_same.append((mine[:num_alike] == theirs[:num_alike]).ravel())
        rows = dataclasses.replace(rows, token_B=rows.token_B + 7, num_own_keys_B=rows.num_own_keys_B + 1)
    decoded = [runner.decode(rows).routes_BLK for runner in (ours, plain)]
    assert decoded[0] is not None and decoded[1] is not None
    is_same.append((decoded[0] == decoded[1]).cpu().numpy().ravel())
    assert np.concatenate(is_same).mean() >= (1 if dtype == torch.float32 else 0.9)
