"""What autograd keeps on each of two ranks that share a pass, against the estimate."""

# Shape letters: P prompt tokens, R response tokens, N responses, H query heads, Hkv key and value heads.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import run_on_ranks
from tests.planner.test_memory import SHAPE, kept_bytes, make_model, rotary_bytes

from ratoon.distributed import DataParallel, ranks_mesh, sequence_group
from ratoon.distributed.ulysses import HeadShares
from ratoon.models import set_compile, set_recompute, set_sequence_parallel
from ratoon.planner.activation_memory import activation_bytes, layer_scratch_bytes
from ratoon.planner.memory_sizes import MicrobatchSize, RecomputeMode

P, R, N = 41, 30, 4


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    recompute: RecomputeMode
    num_kv_heads: int = SHAPE.num_kv_heads
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False


COMPILED = [
    Case(family, mode, dtype=torch.bfloat16, is_compiled=True)
    for family in ("llama", "qwen3")
    for mode in ("none", "selective", "full")
]
CASES = [
    *(Case(family, mode) for family in ("llama", "qwen3") for mode in ("none", "selective", "full")),
    Case("llama", "none", dtype=torch.bfloat16),
    Case("llama", "selective", num_kv_heads=1),  # sent to both
]


def work(ranks: DataParallel, _: Path) -> list[int]:
    return kept_by(CASES, ranks)


def work_compiled(ranks: DataParallel, _: Path) -> list[int]:
    return kept_by(COMPILED, ranks)


def kept_by(cases: Sequence[Case], ranks: DataParallel) -> list[int]:
    group = sequence_group(ranks_mesh("cpu", ranks.world_size), timeout_s=180)
    found: list[int] = []
    for case in cases:
        torch.compiler.reset()
        model = set_recompute(make_model(case.family, case.dtype, num_kv_heads=case.num_kv_heads), case.recompute)
        set_compile(model, "layers" if case.is_compiled else "none").train()
        found.append(kept_bytes(set_sequence_parallel(model, group), P, R, N))
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_on_ranks(2, work, tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_what_autograd_keeps(kept: list[Any], index: int):
    assert_estimated(CASES[index], [of_rank[index] for of_rank in kept])


@pytest.mark.full
def test_what_autograd_keeps_of_compiled_layers(tmp_path: Path):
    kept = run_on_ranks(2, work_compiled, tmp_path)
    for index, case in enumerate(COMPILED):
        assert_estimated(case, [of_rank[index] for of_rank in kept])


def assert_estimated(case: Case, kept: Sequence[int]) -> None:
    whole = MicrobatchSize(
        num_rows=P + N * R, num_scored=N * R, recompute=case.recompute, has_qk_norm=case.family == "qwen3",
        is_compiled=case.is_compiled,
    )  # fmt: skip
    shape = replace(SHAPE, num_kv_heads=case.num_kv_heads)
    own = whole.share(2)
    estimate = activation_bytes(shape, own, case.dtype.itemsize)
    rotary = own.num_rows * rotary_bytes(case.recompute, case.dtype)
    for of_rank in kept:
        assert estimate == pytest.approx(of_rank - rotary, rel=0.03), case


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_heads_as_they_are_shared_out(degree: int, own: int, Hkv: int):
    """The bytes of q, k and v by the heads that each rank has, and never less than on one rank."""
    H = degree * own * Hkv
    shape = replace(SHAPE, num_heads=H, num_kv_heads=Hkv, head_dim=2)
    whole = MicrobatchSize(num_rows=degree, num_scored=0)
    shared = activation_bytes(shape, whole.share(degree), 2) * degree
    shares = HeadShares(H, Hkv, degree)
    more_kv = degree * shares.own_kv_heads - Hkv
    by_rows = 0 if degree == 1 else H
    extra = shared - activation_bytes(shape, whole, 2)
    assert extra == degree * shape.num_layers * 2 * 2 * (2 * more_kv + by_rows)
    assert layer_scratch_bytes(shape, whole.share(degree), 2, on_cuda=True) * degree >= layer_scratch_bytes(
        shape, whole, 2, on_cuda=True
    )
