"""Packed forests against one forward pass per sequence, in float64, gradients included, for every family."""

# Shape letters: T rows, M scored tokens, N sequences.

from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import (
    ALL_FAMILIES,
    FAMILIES,
    VOCAB_SIZE,
    backward,
    build_model,
    gradients,
    kept_in_float64,
    reference_logprobs,
)
from transformers import PreTrainedModel

from ratoon.layout import PackedLayout, pack_groups, pack_sequences
from ratoon.models import attach, forward_logprobs, set_recompute, stock_attention
from ratoon.models.config import Recompute
from ratoon.types import Prompt, Response, RolloutGroup

torch.set_num_threads(1)

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def group(rng: np.random.Generator, prompt: list[int] | int, response_lengths: list[int]) -> RolloutGroup:
    def draw(length: int) -> np.ndarray:
        return rng.integers(3, VOCAB_SIZE, length)

    prompt_ids = draw(prompt) if isinstance(prompt, int) else np.asarray(prompt)
    return RolloutGroup(Prompt("p", prompt_ids), tuple(Response(draw(length)) for length in response_lengths))


def awkward_groups(seed: int = 0) -> list[RolloutGroup]:
    """A prompt of one token, empty and one-token responses, a group of one, the same prompt in two groups."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB_SIZE, 6).tolist()
    return [
        group(rng, 1, [5, 1, 0]),
        group(rng, shared, [4, 7]),
        group(rng, 9, [3]),
        group(rng, shared, [2, 1]),
    ]


def random_tree(seed: int) -> list[list[int]]:
    """Sequences that part at depths up to 4, some of them prefixes of others, some twice."""
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = []

    def grow(prefix: list[int], depth: int) -> None:
        longer = prefix + rng.integers(3, VOCAB_SIZE, rng.integers(1, 6)).tolist()
        if depth == 4 or rng.random() < 0.3:
            sequences.append(longer)
            return
        if rng.random() < 0.2:
            sequences.append(longer)
        for _ in range(rng.integers(1, 4)):
            grow(longer, depth + 1)

    for _ in range(rng.integers(1, 3)):
        grow([], 1)
    if rng.random() < 0.3:
        sequences.append(list(sequences[0]))
    return [sequences[index] for index in rng.permutation(len(sequences))][:12]


def random_forest(seed: int) -> PackedLayout:
    """Trees by radix packing, or groups of every size with the edge cases of response and prompt lengths."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        return pack_sequences(random_tree(seed))
    prompt = rng.integers(3, VOCAB_SIZE, rng.integers(1, 8)).tolist()
    groups = [
        group(rng, 1, rng.integers(0, 3, rng.integers(1, 4)).tolist()),
        group(rng, prompt, [int(rng.integers(1, 6))]),
    ]
    groups += [group(rng, prompt, rng.integers(0, 8, rng.integers(2, 5)).tolist())]
    return pack_groups([groups[index] for index in rng.permutation(3)])


def stock_scores(model: PreTrainedModel, layout: PackedLayout, weight_M: torch.Tensor) -> tuple[Any, Any]:
    set_recompute(model, "none")
    with kept_in_float64(), stock_attention(model, "eager"):
        logprobs_M = reference_logprobs(model, layout)
        backward((logprobs_M * weight_M).sum())
    return logprobs_M.detach(), gradients(model)


def forest_scores(model: PreTrainedModel, layout: PackedLayout, weight_M: torch.Tensor) -> tuple[Any, Any]:
    with kept_in_float64():
        logprobs_M, _ = forward_logprobs(model, layout)
        backward((logprobs_M * weight_M).sum())
    return logprobs_M.detach(), gradients(model)


def assert_parity(ours: tuple[Any, Any], stock: tuple[Any, Any], where: str) -> None:
    assert ours[0].dtype == torch.float64
    torch.testing.assert_close(ours[0], stock[0], rtol=0, atol=1e-10, msg=lambda text: f"{where}: {text}")
    for name, expected in stock[1].items():
        scale = float(expected.abs().max())
        error = float((ours[1][name] - expected).abs().max())
        assert error <= 1e-9 * scale, f"{where}: gradient of {name} is off by {error:.1e} of {scale:.1e}"


def check_family(name: str, impl: str, layouts: list[PackedLayout], modes: tuple[Recompute, ...]) -> None:
    model = attach(build_model(name), impl).train()
    for index, layout in enumerate(layouts):
        weight_M = torch.randn(layout.num_scored, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        stock = stock_scores(model, layout, weight_M)
        assert any(float(grad.abs().max()) > 0 for grad in stock[1].values())
        for mode in modes:
            set_recompute(model, mode)
            assert_parity(forest_scores(model, layout, weight_M), stock, f"{name} {impl} forest {index} {mode}")


def impls_of(name: str) -> list[str]:
    if name == "llama":
        return ["flash", "reference"]
    return ["flash" if ALL_FAMILIES[name].flash else "reference"]


CASES = [(name, impl) for name in ALL_FAMILIES for impl in impls_of(name)]


@pytest.mark.parametrize(("name", "impl"), CASES)
def test_logprobs_and_gradients_agree_with_one_forward_per_sequence(name: str, impl: str):
    """zoo#1019: the comparison is exact to rounding, not to 0.7 nats; AReaL#1442, LlamaFactory#10736: a packed input on
    another attention gives wrong log-probs without an error. TRL#3549, TRL#7328, NeMo-RL#4008, Relax#67 ask for
    shared prompts, MoE included."""
    check_family(name, impl, [pack_groups(awkward_groups()), pack_sequences(random_tree(3))], RECOMPUTE)


def has_scored_tokens(layout: PackedLayout) -> bool:
    return layout.num_scored > 0


def forests(count: int) -> list[PackedLayout]:
    return [layout for layout in map(random_forest, range(2 * count)) if has_scored_tokens(layout)][:count]


def test_random_forests_on_one_family():
    check_family("qwen3", "flash", forests(12), ("none",))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_two_hundred_random_forests(name: str):
    impl = "flash" if FAMILIES[name].flash else "reference"
    layouts = forests(200)
    assert len(layouts) == 200
    check_family(name, impl, layouts[:140], ("none",))
    check_family(name, impl, layouts[140:], RECOMPUTE)


def score(model: PreTrainedModel, groups: list[RolloutGroup]) -> list[torch.Tensor]:
    """Log-probs of each response."""
    layout = pack_groups(groups)
    with torch.no_grad():
        logprobs_M, _ = forward_logprobs(model, layout)
    return [logprobs_M[torch.tensor(layout.sequence_of_M == number)] for number in range(layout.num_sequences)]


DENSE = [(name, impl) for name, impl in CASES if ALL_FAMILIES[name].is_dense]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "impl"), DENSE)
def test_other_sequences_do_not_notice_a_response_of_other_tokens(name: str, impl: str, dtype: torch.dtype):
    """NeMo-RL#2105, NeMo-RL#4167, nanoVLM#204: changing one sequence of a pack changed another's output."""
    model = attach(build_model(name, dtype=dtype), impl)
    groups = awkward_groups()
    before = score(model, groups)
    for changed_group, changed_response in ((0, 0), (1, 1), (2, 0)):
        rng = np.random.default_rng(99)
        changed = list(groups)
        responses = list(groups[changed_group].responses)
        responses[changed_response] = Response(rng.integers(3, VOCAB_SIZE, responses[changed_response].num_tokens))
        changed[changed_group] = RolloutGroup(groups[changed_group].prompt, tuple(responses))
        after = score(model, changed)
        number = sum(each.group_size for each in groups[:changed_group]) + changed_response
        assert not torch.equal(after[number], before[number])
        for other in set(range(len(before))) - {number}:
            assert torch.equal(after[other], before[other]), f"sequence {other} noticed that {number} changed"


@pytest.mark.parametrize(("name", "impl"), CASES)
def test_other_sequences_do_not_notice_a_response_of_other_length(name: str, impl: str):
    model = attach(build_model(name), impl)
    groups = awkward_groups()
    with kept_in_float64():
        before = score(model, groups)
        longer = list(groups)
        responses = (*groups[1].responses[:1], Response(np.arange(3, 16)))
        longer[1] = RolloutGroup(groups[1].prompt, responses)
        after = score(model, longer)
    for other in set(range(len(before))) - {4}:
        torch.testing.assert_close(after[other], before[other], rtol=0, atol=1e-12)
