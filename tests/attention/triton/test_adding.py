"""The backward kernel that adds dQ to sums, against float64: on a simulator here, as compiled on a Hopper GPU."""

# A Triton launch takes a kernel's runtime arguments and its constants in one call.
# pyright: reportCallIssue=false

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attention.oracle import Case, assert_within_error_budget, dense_mask, make_case, make_chain, make_groups
from tests.attention.triton.gluon_simulator import simulated_hopper
from tests.attention.triton.rows_without_weights import assert_a_row_without_weights_stays_alone
from tests.sampling import sampled
from torch import Tensor

from ratoon.attention import AttentionPlan, reference
from ratoon.attention.autograd import KernelPair, attend
from ratoon.attention.kernel import Scoring
from ratoon.attention.triton import adding
from ratoon.attention.triton.machine import CPU_MULTIPROCESSORS
from ratoon.attention.triton.schedule import DeviceIntervals, build_key_schedule
from ratoon.layout import PackedLayout, pack_documents

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

# Tiles have 64 or 128 rows: these have full tiles, partial ones, and rows behind the last whole tile.
GROUPS = make_groups((150, [70, 130, 1]), (5, [140]))
CHAIN = make_chain(3, 61)
DOCUMENTS = pack_documents([[1] * n for n in (260, 1, 97)])
# A window ends before the first response does: the prompt's keys are read by two intervals of rows.
WITH_A_GAP, WINDOW = make_groups((520, [500, 200])), 600
KERNELS = KernelPair(forward=reference.forward, backward=adding.backward)


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_GPU:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("not a Hopper GPU")
        return
    launch = simulated_hopper()
    monkeypatch.setattr(adding, "import_module", lambda _: launch)


def with_plan(plan: AttentionPlan) -> Callable[[Case], Tensor]:
    def attention(case: Case) -> Tensor:
        scoring = Scoring(softmax_scale=case.q_THD.shape[2] ** -0.5)
        return attend(
            case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan, scoring, KERNELS, deterministic=False
        )  # fmt: skip

    return attention


def tiles_of(intervals: DeviceIntervals, item: int) -> list[int]:
    first, stop = intervals.offsets[item : item + 2].tolist()
    spans = zip(intervals.start_J[first:stop].tolist(), intervals.end_J[first:stop].tolist(), strict=True)
    return [tile for start, end in spans for tile in range(start, end)]


def check(layout: PackedLayout, case: Case, dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> None:
    plan = AttentionPlan.build(layout, DEVICE, window)
    assert_within_error_budget(with_plan(plan), case.to(dtype, DEVICE), dense_mask(layout, window).to(DEVICE))


@pytest.mark.parametrize("head_dim", sorted(adding.ADDING_BLOCKS))
@pytest.mark.parametrize("layout", [GROUPS, CHAIN, DOCUMENTS], ids=["groups", "chain", "documents"])
def test_forests(layout: PackedLayout, head_dim: int):
    check(layout, make_case(layout, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
@pytest.mark.parametrize("window", [20, 200])
def test_windows_and_sinks(window: int, head_dim: int):
    case = make_case(GROUPS, heads=(2, 1), head_dim=head_dim, has_sinks=True)
    check(GROUPS, case, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 2)])
def test_heads(heads: tuple[int, int]):
    check(CHAIN, make_case(CHAIN, heads=heads, head_dim=128), torch.float16)


@pytest.mark.parametrize("head_dim", [36, 80])
def test_head_dims_between_the_kernels_own(head_dim: int):
    """The copy engine reads zeros behind a head's last column, and writes nothing there."""
    check(CHAIN, make_case(CHAIN, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
@pytest.mark.parametrize("num_rows", [1, 63, 65, 127, 128, 257])
def test_rows_around_the_borders_of_tiles(num_rows: int, head_dim: int):
    layout = make_groups((num_rows, [3]))
    check(layout, make_case(layout, heads=(1, 1), head_dim=head_dim))


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
def test_a_prompt_below_many_rows_is_split_and_added_up(head_dim: int):
    layout = make_groups((40, [90] * 8))
    check(layout, make_case(layout, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("layout", [GROUPS, make_groups((1, [1]))], ids=["groups", "one tile"])
def test_groups_may_drift_one_or_two_tiles_apart(monkeypatch: pytest.MonkeyPatch, layout: PackedLayout, lag: int):
    monkeypatch.setattr(adding, "ADDING_BLOCKS", {128: replace(adding.ADDING_BLOCKS[128], lag=lag)})
    check(layout, make_case(layout, heads=(4, 2), head_dim=128))


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
def test_keys_that_two_intervals_of_rows_read(head_dim: int):
    check(WITH_A_GAP, make_case(WITH_A_GAP, heads=(2, 1), head_dim=head_dim), window=WINDOW)


@pytest.mark.skipif(HAS_GPU, reason="a compiled kernel does not tell what it copies when")
@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
def test_rows_visit_from_their_end_with_every_head(monkeypatch: pytest.MonkeyPatch, head_dim: int):
    num_kv_heads, group_size = 2, 2
    launch, visits = simulated_hopper(), list[tuple[int, int]]()
    kernels = launch.adding_kernel.function.__globals__
    copy_row_tile = kernels["copy_row_tile"]

    def noted(*args: Any) -> None:
        first_row, head = args[-4:-2]
        visits.append((int(first_row), int(head)))
        copy_row_tile(*args)

    monkeypatch.setitem(kernels, "copy_row_tile", noted)
    monkeypatch.setattr(adding, "import_module", lambda _: launch)
    case = make_case(WITH_A_GAP, heads=(num_kv_heads * group_size, num_kv_heads), head_dim=head_dim)
    check(WITH_A_GAP, case, window=WINDOW)

    plan = AttentionPlan.build(WITH_A_GAP, window=WINDOW)
    num_rows = adding.ADDING_BLOCKS[head_dim].rows
    items = build_key_schedule(plan, num_rows, adding.ITEM_KEYS, CPU_MULTIPROCESSORS, num_kv_heads)
    assert max(items.full.offsets.diff()) > 1, "the case no longer has a gap"
    wanted = [
        (tile * num_rows, kv_head * group_size + turn)
        for item, kv_head in (divmod(work, num_kv_heads) for work in items.work_P.tolist())
        for intervals in (items.partial, items.full)
        for tile in sorted(tiles_of(intervals, item), reverse=True)
        for turn in range(group_size)
    ]
    assert visits == wanted


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
def test_sums_are_put_in_order(head_dim: int):
    """A thread of warp w and lane l holds rows 16w + l // 4 and 8 more of columns 2(l % 4) and one more of each 8."""
    num_rows = adding.ADDING_BLOCKS[head_dim].rows
    sums = torch.arange(num_rows * head_dim, dtype=torch.float32, device=DEVICE)
    dq_THD = torch.empty(num_rows, 1, head_dim, device=DEVICE)
    adding.finish_kernel[(1, 1)](
        sums, dq_THD, *dq_THD.stride()[:2], num_rows, 1, 1.0,
        D=head_dim, BLOCK_M=num_rows, BLOCK_D=head_dim,
    )  # fmt: skip
    wanted_THD = torch.empty(num_rows, 1, head_dim)
    for index in range(num_rows * head_dim):
        half, rest = divmod(index, 64 * 64)
        eight, rest = divmod(rest, 512)
        thread, held = divmod(rest, 4)
        row = thread // 32 * 16 + held // 2 * 8 + thread % 32 // 4
        column = eight * 8 + thread % 4 * 2 + held % 2
        place = (row, 0, 64 * half + column) if head_dim == 128 else (64 * half + row, 0, column)
        wanted_THD[place] = index
    assert torch.equal(dq_THD.cpu(), wanted_THD)


@pytest.mark.parametrize("head_dim", sampled(*sorted(adding.ADDING_BLOCKS)))
def test_a_row_without_weights_leaves_other_documents_alone(head_dim: int):
    """Its log-sum-exp is minus infinity: what it may not read has probabilities of 0, not NaN."""
    assert_a_row_without_weights_stays_alone(adding.backward, head_dim, deterministic=False)


def test_who_asks_for_the_same_bits_is_refused():
    plan = AttentionPlan.build(CHAIN, DEVICE)
    case = make_case(CHAIN, heads=(1, 1), head_dim=64).to(torch.bfloat16, DEVICE)
    out_THE, lse_HT = reference.forward(case.q_THD, case.k_THD, case.v_THE, None, plan, Scoring(softmax_scale=0.125))
    with pytest.raises(AssertionError, match="order"):
        adding.backward(
            case.dout_THE, case.q_THD, case.k_THD, case.v_THE, out_THE, lse_HT, plan, Scoring(softmax_scale=0.125),
            deterministic=True,
        )  # fmt: skip
