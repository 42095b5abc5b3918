"""What holds beyond exactness: isolation, reproducibility, checkpointing, precision, memory, batching."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.attention.fake_varlen import fake_varlen_kernels
from tests.attention.oracle import (
    Case,
    assert_within_error_budget,
    dense_mask,
    make_case,
    make_chain,
    make_groups,
    make_tree,
    output_and_gradients,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.layout import PackedLayout, pack_documents

IMPLS = ("reference", "flash")


def attend(layout: PackedLayout, impl: str) -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout)
    return lambda case: forest_attention(
        case.q_THD, case.k_THD, case.v_THE, plan, sinks_H=case.sinks_H, impl=impl, deterministic=True
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_changing_one_sequence_leaves_the_others_bitwise_equal(impl: str, dtype: torch.dtype):
    """Changing sequence 1 moved sequence 2: NeMo-RL#4167, NeMo-RL#2105."""
    layout = make_groups((40, [7, 7, 20]), (3, [7, 65]), (40, [7, 7, 20]))
    case = make_case(layout, has_sinks=True).to(dtype)
    attention = attend(layout, impl)
    before = output_and_gradients(attention, case)
    segment = 2  # the second response of the first group
    changed = slice(int(layout.segment_offsets[segment]), int(layout.segment_offsets[segment + 1]))
    others = torch.ones(layout.num_rows, dtype=torch.bool)
    others[changed] = False

    def redraw(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[changed] = 3 * torch.randn(tensor[changed].shape, dtype=torch.float64).to(tensor.dtype)
        return tensor

    moved = replace(case, q_THD=redraw(case.q_THD), k_THD=redraw(case.k_THD), v_THE=redraw(case.v_THE))
    after = output_and_gradients(attention, moved)
    assert torch.equal(before[0][others], after[0][others])
    assert torch.equal(before[1][others], after[1][others]), "the gradient of another sequence's query moved"
    assert not torch.equal(before[0][changed], after[0][changed])


@pytest.mark.parametrize("spoilt", ["k_THD", "v_THE"])
@pytest.mark.parametrize("impl", IMPLS)
def test_nan_of_one_response_reaches_no_other(impl: str, spoilt: str):
    layout = make_groups((4, [3, 5, 2]), (3, [2]))
    case = make_case(layout, heads=(4, 2), has_sinks=True)
    first, last = (int(offset) for offset in layout.segment_offsets[2:4])  # the second response
    tensor = getattr(case, spoilt).clone()
    tensor[first, 0, 0] = torch.nan  # for one key head
    before = output_and_gradients(attend(layout, impl), case)
    after = output_and_gradients(attend(layout, impl), replace(case, **{spoilt: tensor}))
    others = torch.ones(layout.num_rows, dtype=torch.bool)
    others[first:last] = False
    assert torch.equal(before[0][others], after[0][others])
    assert torch.equal(before[1][others], after[1][others]), "the gradient of another response's query moved"
    assert after[0][~others].isnan().any()
    assert after[0][others].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_are_bitwise_reproducible(impl: str):
    layout = make_groups((70, [33, 33, 3]), (40, [5, 5]))
    case = make_case(layout, heads=(6, 2), head_dim=8, has_sinks=True).to(torch.float32)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, *rest = (output_and_gradients(attend(layout, impl), case) for _ in range(4))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(x, y) for again in rest for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_checkpointing_changes_nothing(impl: str, use_reentrant: bool):
    layout = make_groups((5, [3, 2]), (2, [4]))
    case = make_case(layout, has_sinks=True)
    attention = attend(layout, impl)

    def checkpointed(case: Case) -> Tensor:
        def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            return attention(Case(q * 2, k, v, sinks, case.dout_THE)) * 1.5

        assert case.sinks_H is not None
        inputs = (case.q_THD, case.k_THD, case.v_THE, case.sinks_H)
        return checkpoint(layer, *inputs, use_reentrant=use_reentrant) if is_checkpointed else layer(*inputs)

    def gradients(case: Case) -> list[Tensor]:
        assert case.sinks_H is not None
        leaves = [x.detach().clone().requires_grad_() for x in (case.q_THD, case.k_THD, case.v_THE, case.sinks_H)]
        q_THD, k_THD, v_THE, sinks_H = leaves
        checkpointed(Case(q_THD, k_THD, v_THE, sinks_H, case.dout_THE)).backward(case.dout_THE)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    is_checkpointed = False
    wanted = gradients(case)
    is_checkpointed = True
    got = gradients(case)
    assert len(got) == len(wanted) == 4
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_reach_inside(impl: str):
    layout = make_groups((5, [3, 2]))
    case = make_case(layout).to(torch.float32)
    wanted = output_and_gradients(attend(layout, impl), case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = output_and_gradients(attend(layout, impl), case)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_a_compiled_model_leaves_the_op_alone():
    layout = make_groups((5, [3, 2]))
    case = make_case(layout)
    plan = AttentionPlan.build(layout)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return forest_attention(q * 2, k, v, plan).sin()

    inputs = (case.q_THD, case.k_THD, case.v_THE)
    assert torch.equal(torch.compile(layer, backend="eager")(*inputs), layer(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", IMPLS)
def test_low_precision_stays_in_its_error_budget(impl: str, dtype: torch.dtype):
    for layout in (make_groups((130, [64, 64, 17]), (50, [9])), make_chain(5, 13)):
        case = make_case(layout, heads=(4, 2), head_dim=32, has_sinks=True).to(dtype)
        assert_within_error_budget(attend(layout, impl), case, dense_mask(layout))


def test_one_varlen_call_a_level_whatever_the_number_of_groups():
    """A varlen call for each group would leave a GPU idle between them."""
    for layout, num_calls in (
        (pack_documents([[1] * n for n in (3, 1, 4)]), 1),
        (make_groups((3, [2, 2])), 2),
        (make_groups(*[(3, [2, 5, 1])] * 6), 2),
        (make_tree([2, 3, 1, 1, 2, 4, 3], [-1, 0, 1, 1, 0, -1, 5]), 3),
        (make_chain(6, 2), 7),
    ):
        case = make_case(layout)
        plan = fake_varlen_kernels.on_this_plan(AttentionPlan.build(layout))
        with fake_varlen_kernels.installed(), torch.no_grad():
            fake_varlen_kernels.num_calls = 0
            forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, impl="flash")
        assert fake_varlen_kernels.num_calls == num_calls


def peak_extra_bytes(layout: PackedLayout, impl: str) -> int:
    """The most bytes that forward and backward hold at a time beyond their inputs, gradients included."""
    case = make_case(layout, heads=(4, 2), head_dim=16).to(torch.float32)
    attention = attend(layout, impl)
    output_and_gradients(attention, case)  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output_and_gradients(attention, case)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return peak


def test_memory_is_linear_in_rows_and_independent_of_the_number_of_responses():
    P, R = 512, 64
    small, large = (peak_extra_bytes(make_groups((P, [R] * N)), "flash") for N in (24, 56))
    assert 1.5 < large / small <= 2.2, "2048 and 4096 rows"
    many_responses = peak_extra_bytes(make_groups((P, [16] * 224)), "flash")
    assert many_responses <= 1.05 * large, "the same rows in four times as many responses"
    bytes_of_queries = 4 * 16 * 4 * (P + 56 * R)
    assert large <= 9 * bytes_of_queries, "more than outputs, gradients and one level of each"


def test_reference_holds_a_block_of_scores_at_a_time():
    small, large = (peak_extra_bytes(make_groups((256, [64] * N)), "reference") for N in (28, 60))
    assert large / small <= 2.2, "2048 and 4096 rows"


def test_thousands_of_tiny_documents_are_batched():
    lengths = [1 + index * 7 % 3 for index in range(4000)]
    layout = pack_documents([[1] * length for length in lengths])
    plan = AttentionPlan.build(layout)
    case = make_case(layout, heads=(2, 1)).to(torch.float32)
    start = time.perf_counter()
    output_and_gradients(lambda case: forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, impl="flash"), case)
    assert time.perf_counter() - start < 5, "about 0.05 s batched"


@pytest.mark.parametrize("what", ["k_THD", "v_THE"])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_not_finite_is_seen_in_the_gradients_too(impl: str, what: str):
    """A loss that leaves NaN out, and a norm of gradients that is finite, would hide it."""
    layout = make_groups((5, [3, 4]))
    case = make_case(layout).to(torch.float32)
    getattr(case, what)[6] = torch.nan  # the first response's second row, that its third reads too
    out_THE, dq_THD, dk_THD, dv_THE = output_and_gradients(attend(layout, impl), case)
    for tensor in (out_THE, dq_THD):
        assert tensor[6:8].isnan().all()
    assert dk_THD[5:8].isnan().any(dim=(1, 2)).all()
    if impl == "reference":  # tiles of fused kernels share it among their rows
        assert all(x[:5].isfinite().all() for x in (out_THE, dq_THD))
        assert all(x[8:].isfinite().all() for x in (out_THE, dq_THD, dk_THD, dv_THE))
