"""Forest attention is each sequence's own causal attention, forward and backward, whatever the forest."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.fake_varlen import fake_varlen_kernels
from tests.attention.oracle import (
    Case,
    assert_close,
    dense_attention,
    dense_mask,
    forests,
    make_case,
    make_chain,
    make_groups,
    make_tree,
    output_and_gradients,
)
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention, reference
from ratoon.attention.autograd import KernelPair
from ratoon.attention.autograd import attend as attend_by
from ratoon.attention.flash import cpu
from ratoon.attention.kernel import Scoring
from ratoon.layout import PackedLayout, pack_documents, pack_sequences

PAIRS = {
    "flash, reference": KernelPair(cpu.forward, reference.backward),
    "reference, flash": KernelPair(reference.forward, cpu.backward),
}
"""Forward and backward kernels of different implementations."""

IMPLS = ("reference", "flash", "flash-varlen", *PAIRS)
"""`flash-varlen` is the CUDA path on CPU tensors, with its kernels replaced by eager ones."""

TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Forests of a dozen rows cross every threshold that long ones would."""
    with (
        patch("ratoon.attention.row_blocks.MAX_BLOCK_ROWS", 5),
        patch("ratoon.attention.row_blocks.MAX_BLOCK_SCORES", 40),
        patch("ratoon.attention.flash.schedule.MAX_GATHERED_RUN", 2),
    ):
        yield


def attend(layout: PackedLayout, impl: str, window: int | None = None) -> Callable[[Case], Tensor]:
    def attention(case: Case) -> Tensor:
        plan = AttentionPlan.build(layout, window=window)
        if impl in PAIRS:
            scale = case.softmax_scale or 1 / math.sqrt(case.q_THD.shape[2])
            scoring = Scoring(softmax_scale=scale, softcap=case.softcap)
            tensors = (case.q_THD, case.k_THD, case.v_THE, case.sinks_H)
            return attend_by(*tensors, plan, scoring, PAIRS[impl], deterministic=True)
        if impl == "flash-varlen":
            plan = fake_varlen_kernels.on_this_plan(plan)
        return forest_attention(
            case.q_THD,
            case.k_THD,
            case.v_THE,
            plan,
            softmax_scale=case.softmax_scale,
            softcap=case.softcap,
            sinks_H=case.sinks_H,
            impl="flash" if impl == "flash-varlen" else impl,
        )

    return attention


def check_against_dense(layout: PackedLayout, case: Case, impl: str, window: int | None = None) -> None:
    """To 1e-10 in float64; to a few roundings in float32 where the implementation has no float64."""
    mask_TT = dense_mask(layout, window)
    wanted = output_and_gradients(lambda case: dense_attention(case, mask_TT), case)
    dtype, tolerance = (torch.float32, 2e-6) if impl == "triton" else (torch.float64, 1e-10)
    with fake_varlen_kernels.installed():
        got = output_and_gradients(attend(layout, impl, window), case.to(dtype))
    assert all(x.dtype == dtype for x in got)
    assert_close([x.double() for x in got], wanted, tolerance)


@pytest.mark.parametrize("impl", IMPLS)
@given(
    layout=forests,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (5, 1)]),
    head_dims=st.sampled_from([(8, 8), (5, 5), (6, 4), (4, 12)]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
    are_blocks_small=st.booleans(),
)
@settings(max_examples=40)
def test_equals_dense_softmax(
    impl: str,
    layout: PackedLayout,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    has_sinks: bool,
    seed: int,
    are_blocks_small: bool,
):
    case = make_case(
        layout, heads=heads, head_dim=head_dims[0], v_head_dim=head_dims[1], has_sinks=has_sinks, seed=seed
    )
    if are_blocks_small:
        with small_blocks():
            check_against_dense(layout, case, impl)
    else:
        check_against_dense(layout, case, impl)


@pytest.mark.full
@pytest.mark.parametrize("impl", IMPLS)
@given(layout=forests, has_sinks=st.booleans(), seed=st.integers(0, 2**16))
@settings(max_examples=400)
def test_equals_dense_softmax_on_many_forests(impl: str, layout: PackedLayout, has_sinks: bool, seed: int):
    with small_blocks():
        check_against_dense(layout, make_case(layout, has_sinks=has_sinks, seed=seed), impl)


@given(
    layout=forests,
    window=st.one_of(st.none(), st.integers(1, 12)),
    softcap=st.one_of(st.none(), st.floats(0.5, 50)),
    has_sinks=st.booleans(),
    are_blocks_small=st.booleans(),
)
@settings(max_examples=60)
def test_reference_has_window_softcap_and_sinks(
    layout: PackedLayout, window: int | None, softcap: float | None, has_sinks: bool, are_blocks_small: bool
):
    """The window counts logical positions: a response's first tokens still see the prompt's last."""
    case = make_case(layout, has_sinks=has_sinks, softcap=softcap, softmax_scale=0.7)
    if are_blocks_small:
        with small_blocks():
            check_against_dense(layout, case, "reference", window)
    else:
        check_against_dense(layout, case, "reference", window)


@pytest.mark.parametrize("impl", IMPLS)
@given(layout=forests)
@settings(max_examples=15)
def test_equals_each_sequence_by_itself(impl: str, layout: PackedLayout):
    """A packed mask that is dropped or misread gives wrong log-probs without an error: AReaL#1442.

    Positions of a response start at P, so none of its own rows has position 0: transformers#39814.
    """
    case = make_case(layout)
    with fake_varlen_kernels.installed(), torch.no_grad():
        out_THE = attend(layout, impl)(case)
    for sequence in range(layout.num_sequences):
        rows = torch.from_numpy(layout.sequence_rows(sequence))
        alone = Case(case.q_THD[rows], case.k_THD[rows], case.v_THE[rows], None, case.dout_THE[rows])
        causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        assert_close([out_THE[rows]], [dense_attention(alone, causal)], 1e-10)


NAMED_FORESTS = {
    "one row": make_groups((1, [])),
    "group of one": make_groups((1, [1])),
    "empty responses": make_groups((3, [0, 2, 0]), (1, [0])),
    "equal groups": make_groups((4, [3, 3]), (4, [3, 3]), (4, [3, 3])),
    "ragged groups": make_groups((65, [7, 1, 30]), (2, [70]), (33, [9, 9, 9])),
    "depth 6": make_chain(6, 3),
    "node with many descendants": make_tree([2, 3, 1, 1, 2, 4, 3], [-1, 0, 1, 1, 0, -1, 5]),
    "documents": pack_documents([[1] * n for n in (1, 3, 2, 3, 1, 3, 130)]),
    "identical prompts in two groups": make_groups((5, [2, 2]), (5, [2, 2])),
    "sequence that ends inside another": pack_sequences([[1, 2], [1, 2, 3, 4], [1, 2, 3, 5]]),
}


@pytest.mark.parametrize("impl", [*IMPLS, TRITON])
@pytest.mark.parametrize("name", NAMED_FORESTS)
def test_named_forests(impl: str, name: str):
    layout = NAMED_FORESTS[name]
    heads = (2, 1) if impl == "triton" else (4, 2)  # the interpreter takes a second for a thousand tiles
    check_against_dense(layout, make_case(layout, heads=heads, has_sinks=True), impl)


@pytest.mark.parametrize("impl", [*IMPLS, TRITON])
def test_no_rows(impl: str):
    """An idle rank's microbatch is empty; varlen kernels stop with "batch size must be positive": verl#1270."""
    layout = pack_documents([])
    case = make_case(layout, v_head_dim=4, has_sinks=True).to(torch.float32 if impl == "triton" else torch.float64)
    with fake_varlen_kernels.installed():
        got = output_and_gradients(attend(layout, impl), case)
    assert [list(x.shape) for x in got] == [[0, 4, 4], [0, 4, 8], [0, 2, 8], [0, 2, 4], [4]]
    assert got[4].eq(0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_scores_do_not_overflow(impl: str):
    layout = make_groups((3, [2, 4]))
    case = make_case(layout, has_sinks=True, softmax_scale=300.0)
    with fake_varlen_kernels.installed():
        got = output_and_gradients(attend(layout, impl), case)
    assert all(x.isfinite().all() for x in got)
    # Scores this far apart make softmax pick one key.
    values_of_keys = case.v_THE.repeat_interleave(2, dim=1)
    distance = (got[0][None] - values_of_keys[:, None]).abs().amax(dim=-1).amin(dim=0)
    is_sink = got[0].abs().amax(dim=-1) < 1e-6
    assert ((distance < 1e-6) | is_sink).float().mean() > 0.9


@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_pass_gradcheck(impl: str):
    layout = make_groups((2, [1, 3]), (1, [2]))
    case = make_case(layout, heads=(2, 1), head_dim=3, has_sinks=True)
    leaves = [x.requires_grad_() for x in (case.q_THD, case.k_THD, case.v_THE)]
    assert case.sinks_H is not None
    with fake_varlen_kernels.installed():
        assert torch.autograd.gradcheck(
            lambda q, k, v, sinks: attend(layout, impl)(Case(q, k, v, sinks, case.dout_THE)),
            (*leaves, case.sinks_H.requires_grad_()),
        )


@pytest.mark.parametrize("impl", [*IMPLS, TRITON])
def test_any_strides(impl: str):
    """Models hand over views of [B, H, T, D] and gradients without memory of their own."""
    layout = make_groups((5, [3, 1, 3]), (2, [3]))
    case = make_case(layout)
    strided = Case(
        q_THD=case.q_THD.transpose(0, 1).contiguous().transpose(0, 1),
        k_THD=case.k_THD.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        v_THE=case.v_THE.transpose(0, 1).contiguous().transpose(0, 1),
        sinks_H=None,
        dout_THE=torch.ones(1, 1, 1, dtype=torch.float64).expand_as(case.dout_THE),
    )
    check_against_dense(layout, strided, impl)


@pytest.mark.parametrize("impl", ["reference", TRITON])
@pytest.mark.parametrize(("window", "softcap"), [(3, None), (None, 0.7), (6, 2.0)])
def test_windows_and_softcap_on_a_deep_forest(impl: str, window: int | None, softcap: float | None):
    layout = make_chain(4, 5)
    check_against_dense(layout, make_case(layout, v_head_dim=5, has_sinks=True, softcap=softcap), impl, window)


def test_window_of_the_longest_sequence_is_no_window():
    layout = make_groups((4, [3, 5]), (8, [0]))  # longest: 9 tokens
    assert AttentionPlan.build(layout, window=9).window is None
    assert AttentionPlan.build(layout, window=8).window == 8
