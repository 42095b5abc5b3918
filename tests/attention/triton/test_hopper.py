"""The kernels for Hopper against float64: on a simulator here, as compiled on a Hopper GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.attention.oracle import (
    Case,
    assert_within_error_budget,
    dense_mask,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)
from tests.attention.triton.gluon_simulator import simulated_hopper
from tests.attention.triton.rows_without_weights import assert_a_row_without_weights_stays_alone
from tests.sampling import sampled
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.attention.kernel import Scoring
from ratoon.attention.triton import attention as triton_attention
from ratoon.attention.triton.blocks import HOPPER_BLOCKS
from ratoon.attention.triton.machine import machine_of
from ratoon.layout import PackedLayout, pack_documents

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

# Tiles have 128 rows: these have full tiles, partial ones, and rows behind the last whole tile.
GROUPS = make_groups((150, [70, 130, 1]), (5, [140]))
CHAIN = make_chain(3, 61)
DOCUMENTS = pack_documents([[1] * n for n in (260, 1, 97)])


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are served by the kernels for Hopper."""
    if HAS_GPU:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("not a Hopper GPU")
        return
    monkeypatch.setattr(triton_attention, "machine_of", lambda device: machine_of(device)._replace(is_hopper=True))
    launch = simulated_hopper()
    monkeypatch.setattr(triton_attention, "import_module", lambda _: launch)


def attend(layout: PackedLayout, window: int | None = None) -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout, DEVICE, window)

    def attention(case: Case) -> Tensor:
        return forest_attention(
            case.q_THD, case.k_THD, case.v_THE, plan, sinks_H=case.sinks_H, deterministic=True, impl="triton"
        )

    return attention


def check(layout: PackedLayout, case: Case, dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> None:
    mask_TT = dense_mask(layout, window).to(DEVICE)
    assert_within_error_budget(attend(layout, window), case.to(dtype, DEVICE), mask_TT)


@pytest.mark.parametrize("head_dim", sorted(HOPPER_BLOCKS))
@pytest.mark.parametrize("layout", [GROUPS, CHAIN, DOCUMENTS], ids=["groups", "chain", "documents"])
def test_forests(layout: PackedLayout, head_dim: int):
    check(layout, make_case(layout, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("head_dim", sampled(*sorted(HOPPER_BLOCKS)))
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20, 200])
def test_windows_and_sinks(window: int | None, has_sinks: bool, head_dim: int):
    case = make_case(GROUPS, heads=(2, 1), head_dim=head_dim, has_sinks=has_sinks)
    check(GROUPS, case, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2)])
def test_heads(heads: tuple[int, int]):
    check(CHAIN, make_case(CHAIN, heads=heads, head_dim=64), torch.float16)


@pytest.mark.parametrize("head_dim", [36, 80, 160])
def test_head_dims_between_the_kernels_own(head_dim: int):
    """The copy engine reads zeros behind a head's last column, and writes nothing there."""
    layout = make_groups((40, [90] * 3))
    check(layout, make_case(layout, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 127, 128, 129, 257])
def test_rows_around_the_borders_of_tiles(num_rows: int):
    layout = make_groups((num_rows, [3]))
    check(layout, make_case(layout, heads=(1, 1), head_dim=64))


@pytest.mark.parametrize("head_dim", sampled(*sorted(HOPPER_BLOCKS)))
def test_a_prompt_below_many_rows_is_split_and_added_up(head_dim: int):
    layout = make_groups((40, [90] * 8))
    check(layout, make_case(layout, heads=(2, 1), head_dim=head_dim))


@pytest.mark.parametrize("head_dim", sampled(*sorted(HOPPER_BLOCKS)))
def test_gradients_are_the_same_bits_in_every_run(head_dim: int):
    case = make_case(GROUPS, heads=(2, 1), head_dim=head_dim).to(torch.bfloat16, DEVICE)
    first, *others = (output_and_gradients(attend(GROUPS), case) for _ in range(3))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("head_dim", sampled(*sorted(HOPPER_BLOCKS)))
def test_a_row_without_weights_leaves_other_documents_alone(head_dim: int):
    """Its log-sum-exp is minus infinity: what it may not read has probabilities of 0, not NaN."""
    assert_a_row_without_weights_stays_alone(triton_attention.backward, head_dim, deterministic=True)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 40])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (256, None), (64, 20)])
def test_outputs_do_not_depend_on_who_does_which_rows(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, window: int | None, num_programs: int
):
    """The same bits from programs with many tiles of rows, one and none, with room for the next rows or without."""
    layout = make_groups((150, [70, 130, 1]))
    case = make_case(layout, heads=(2, 1), head_dim=head_dim).to(torch.bfloat16, DEVICE)
    plan, scoring = AttentionPlan.build(layout, DEVICE, window), Scoring(softmax_scale=head_dim**-0.5)
    inputs = (case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan, scoring)
    out_THD, lse_HT = triton_attention.forward(*inputs)
    launch = triton_attention.import_module("ratoon.attention.triton.hopper.launch")
    monkeypatch.setattr(
        launch, "machine_of", lambda device: machine_of(device)._replace(num_multiprocessors=num_programs)
    )
    for row_stages in (1, 2) if head_dim < 256 else (1,):
        blocks = replace(HOPPER_BLOCKS[head_dim], forward_row_stages=row_stages)
        monkeypatch.setitem(HOPPER_BLOCKS, head_dim, blocks)
        others_out_THD, others_lse_HT = triton_attention.forward(*inputs)
        assert torch.equal(others_out_THD, out_THD)
        assert torch.equal(others_lse_HT, lse_HT)
