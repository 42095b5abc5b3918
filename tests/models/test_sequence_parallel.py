"""A layout on several gloo ranks, against one process that has all its rows."""

# Shape letters: M scored tokens, B rows of one rank, U ranks, C channels.

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import run_on_ranks
from tests.parity.families import ALL_FAMILIES, SIZES, VOCAB_SIZE, backward, build_model, gradients, kept_in_float64
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ratoon.distributed import DataParallel, SequenceGroup, ranks_mesh, sequence_group
from ratoon.layout import PackedLayout, pack_documents, pack_groups, pack_sequences, pad_rows
from ratoon.models import (
    LoraConfig,
    add_adapters,
    attach,
    check_sequence_parallel,
    forward_logprobs,
    model_shape,
    set_recompute,
    set_sequence_parallel,
)
from ratoon.models.config import Recompute
from ratoon.models.interface import attachment_of
from ratoon.models.sequence_parallel import ScoredShare
from ratoon.types import Prompt, Response, RolloutGroup, SampledSupport, UserError

rng = np.random.default_rng(5)


def rollouts(num_prompt_tokens: int, *lengths: int) -> RolloutGroup:
    return RolloutGroup(
        Prompt("p", rng.integers(3, VOCAB_SIZE, num_prompt_tokens)),
        tuple(Response(rng.integers(3, VOCAB_SIZE, length)) for length in lengths),
    )


LAYOUTS: dict[str, PackedLayout] = {
    "groups": pack_groups([rollouts(5, 7, 1, 6), rollouts(1, 4), rollouts(4, 3, 0, 5)]),  # 37 rows
    "long prompt": pack_groups([rollouts(23, 3)]),  # all that is scored is in the last block
    "tree": pack_sequences([[5, 6, 7, 8, 9, 4], [5, 6, 7, 20, 21], [5, 6, 30], [31, 32], [4]]),
    "two rows": pack_documents([[4, 5]]),  # one scored token: other ranks have none
}


@dataclass(frozen=True, slots=True)
class Case:
    layout: str = "groups"
    family: str | None = None
    """One of `tests.parity.families`, or a Llama of these heads."""

    heads: tuple[int, int] = (12, 3)
    """Query heads, key and value heads."""

    recompute: Recompute = "none"
    adapted: bool = False
    supported: bool = False
    """Scored among kept tokens only."""


def llama(heads: int, kv_heads: int) -> PreTrainedModel:
    sizes: dict[str, Any] = SIZES | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.float64)


def build(case: Case) -> PreTrainedModel:
    model = attach(llama(*case.heads) if case.family is None else build_model(case.family))
    if case.adapted:
        add_adapters(model, LoraConfig(rank=3, alpha=5), seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
    return set_recompute(model, case.recompute)


def support_of(layout: PackedLayout) -> SampledSupport:
    """Each scored token among itself and some others."""
    draw = np.random.default_rng(1)
    kept = [np.union1d(draw.integers(0, VOCAB_SIZE, draw.integers(0, 20)), [target]) for target in layout.target_M]
    return SampledSupport.of([ids.astype(np.int32) for ids in kept])


def scores_and_gradients(model: PreTrainedModel, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """[2, M] log-probs and entropies, and this rank's gradients of a loss of both."""
    layout = LAYOUTS[case.layout]
    support = support_of(layout) if case.supported else None
    with kept_in_float64():
        logprobs_M, entropy_M = forward_logprobs(model, layout, 0.8, support=support)
        weights_M = torch.linspace(-1, 1, logprobs_M.numel(), dtype=torch.float64) + 0.2
        backward((logprobs_M * weights_M).sum() + (entropy_M * weights_M.square()).sum())
    return torch.stack([logprobs_M, entropy_M]).detach(), gradients(model)


def run_case(case: Case, group: SequenceGroup) -> dict[str, Any]:
    """Scores and summed gradients of the group, and largest differences from those of one rank."""
    model = build(case)
    expected_2M, expected_gradients = scores_and_gradients(model, case)
    found_2M, found = scores_and_gradients(set_sequence_parallel(model, group), case)
    for value in found.values():
        dist.all_reduce(value)
    return {
        "scores": (found_2M - expected_2M).abs().max().item(),
        "gradients": max((found[name] - value).abs().max().item() for name, value in expected_gradients.items()),
        "largest gradient": max(value.abs().max().item() for value in expected_gradients.values()),
    }


CASES: dict[int, list[Case]] = {
    2: [
        *(Case(family=family) for family in ("qwen3", "gemma2", "gpt_oss", "qwen3_moe", "phi3")),
        *(Case(layout, heads=(4, 1)) for layout in LAYOUTS),
        Case(heads=(6, 2)),  # a rank's queries read one head and a half
        Case(recompute="selective", heads=(4, 4)),
        Case(recompute="full", heads=(4, 1)),
        Case(recompute="full", family="gpt_oss"),
        Case(adapted=True, family="qwen3"),
        Case(adapted=True, recompute="full", family="qwen2"),
        Case(supported=True, family="cohere"),
    ],
    3: [Case(layout, heads=heads) for layout in ("groups", "two rows") for heads in ((3, 1), (6, 2), (12, 3), (6, 6))],
    4: [
        *(Case(layout, heads=(4, 1)) for layout in LAYOUTS),
        *(Case(heads=heads) for heads in ((4, 2), (12, 3), (4, 4), (8, 8))),
        Case(family="gemma3", recompute="full"),
    ],
}


def run_cases(ranks: DataParallel, _: Path) -> dict[str, Any]:
    group = sequence_group(ranks_mesh("cpu", ranks.world_size), timeout_s=60)
    found = {fact.__name__: fact(group) for fact in FACTS} if ranks.world_size == 2 else {}
    return found | {"cases": [run_case(case, group) for case in CASES[ranks.world_size]]}


def every_rank_has_all(group: SequenceGroup) -> Tensor:
    return scores_and_gradients(set_sequence_parallel(build(Case()), group), Case())[0]


def nothing_scored(group: SequenceGroup) -> list[int]:
    model = set_sequence_parallel(attach(llama(4, 2)), group)
    return [result_M.numel() for result_M in forward_logprobs(model, pack_documents([[4]]))]


def copies_and_attaching_again(group: SequenceGroup) -> list[bool]:
    """Whether the group stays with a deep copy, with attaching again, and goes where it is taken away or is of one."""
    model = set_sequence_parallel(attach(llama(4, 2)), group)
    twin, again = copy.deepcopy(model), attach(copy.deepcopy(model), "reference")
    stays = [attachment_of(each).sequence_group is group for each in (model, twin, again)]
    alone = SequenceGroup(rank=0, size=1)
    return stays + [attachment_of(set_sequence_parallel(model, gone)).sequence_group is None for gone in (alone, None)]


def wrong_degree(group: SequenceGroup) -> str:
    with pytest.raises(UserError) as error:
        set_sequence_parallel(attach(llama(3, 1)), group)
    return str(error.value)


FACTS: tuple[Callable[[SequenceGroup], Any], ...] = (
    every_rank_has_all,
    nothing_scored,
    copies_and_attaching_again,
    wrong_degree,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {size: run_on_ranks(size, run_cases, tmp_path_factory.mktemp(f"{size}")) for size in CASES}


@pytest.mark.parametrize(
    ("degree", "index"), [(degree, index) for degree, cases in CASES.items() for index in range(len(cases))]
)
def test_ranks_together_equal_one(found: dict[int, list[dict[str, Any]]], degree: int, index: int):
    """Log-probs, entropies and all weights' gradients: rows that no degree divides, responses across blocks, ranks with
    nothing to score, fewer kv heads than ranks, windows, softcaps, sinks, experts, recomputation, adapters."""
    for of_rank in found[degree]:
        result = of_rank["cases"][index]
        assert result["scores"] < 1e-10, CASES[degree][index]
        assert result["gradients"] < 1e-9, CASES[degree][index]
        assert result["largest gradient"] > 1e-3, "nothing was compared"


def test_ranks_hold_the_same_bits(found: dict[int, list[dict[str, Any]]]):
    """They compute one loss each, which must be one."""
    first, second = (of_rank["every_rank_has_all"] for of_rank in found[2])
    assert torch.equal(first, second)


def test_a_layout_without_scored_tokens_is_empty_on_all_ranks(found: dict[int, list[dict[str, Any]]]):
    assert [of_rank["nothing_scored"] for of_rank in found[2]] == [[0, 0], [0, 0]]


def test_the_group_stays_with_the_model(found: dict[int, list[dict[str, Any]]]):
    assert [of_rank["copies_and_attaching_again"] for of_rank in found[2]] == [[True] * 5] * 2


def test_heads_that_do_not_divide_are_refused(found: dict[int, list[dict[str, Any]]]):
    message = found[2][0]["wrong_degree"]
    assert "3 attention heads cannot be shared out over 2 ranks" in message and "can be 1, 3" in message


@pytest.mark.parametrize("degree", [0, -2, 5, 24])
def test_degrees_that_work_are_named(degree: int):
    shape = model_shape(ALL_FAMILIES["llama"].build_config())
    with pytest.raises(UserError, match=r"can be 1, 2, 4$"):
        check_sequence_parallel(shape, degree)
    for fine in (1, 2, 4):
        check_sequence_parallel(shape, fine)
        check_sequence_parallel(replace(shape, num_kv_heads=1), fine)


def fake_group(rank: int, size: int) -> SequenceGroup:
    return SequenceGroup(rank=rank, size=size, process_group=cast(Any, None if size == 1 else object()))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_every_token_is_scored_once_from_its_row(shapes: list[tuple[int, list[int]]], degree: int):
    """The exchange played through by hand: what each rank receives, in the order it scores it."""
    layout = pack_groups([rollouts(P, *lengths) for P, lengths in shapes])
    padded = pad_rows(layout, fake_group(0, degree).padded(layout.num_rows))
    shares = [ScoredShare.of(padded, fake_group(rank, degree)) for rank in range(degree)]
    block = padded.num_rows // degree
    outbox = [
        np.split(share.sent_row_X + rank * block, np.cumsum(share.send_counts)[:-1])
        for rank, share in enumerate(shares)
    ]
    scored: list[int] = []
    for rank, share in enumerate(shares):
        arrived = [outbox[source][rank] for source in range(degree)]
        assert tuple(rows.size for rows in arrived) == share.receive_counts
        scored += np.concatenate(arrived)[share.place_m].tolist()
    assert scored == layout.predictor_row_M.tolist()
    sizes = [share.place_m.size for share in shares]
    assert max(sizes) == -(-layout.num_scored // degree), "an equal part each"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_parts_of_a_support(counts: list[int], data: st.DataObject):
    support = SampledSupport.of([np.arange(count, dtype=np.int32) + count for count in counts])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=3)))
    edges = [0, *cuts, len(counts)]
    parts = [support.part(start, stop) for start, stop in pairwise(edges)]
    together = SampledSupport.concatenate(parts)
    assert together.offsets.tolist() == support.offsets.tolist()
    assert together.token_ids.tolist() == support.token_ids.tolist()
