"""Our kernels against float64: under Triton's interpreter on a CPU, as compiled on a GPU.

Shapes are tiny, because the interpreter runs one program at a time; they still take every branch of the kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.oracle import (
    Case,
    assert_close,
    assert_within_error_budget,
    dense_attention,
    dense_mask,
    forests,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.attention.triton.schedule import build_key_schedule
from ratoon.layout import PackedLayout, pack_documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GROUPS = make_groups((21, [9, 1, 14]), (2, [5]))
CHAIN = make_chain(2, 7)
DOCUMENTS = pack_documents([[1] * n for n in (17, 1, 33)])


def attend(layout: PackedLayout, window: int | None = None) -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout, DEVICE, window)

    def attention(case: Case) -> Tensor:
        return forest_attention(
            case.q_THD,
            case.k_THD,
            case.v_THE,
            plan,
            softmax_scale=case.softmax_scale,
            softcap=case.softcap,
            sinks_H=case.sinks_H,
            deterministic=True,
            impl="triton",
        )

    return attention


def check(layout: PackedLayout, case: Case, dtype: torch.dtype, window: int | None = None) -> None:
    mask_TT = dense_mask(layout, window).to(DEVICE)
    assert_within_error_budget(attend(layout, window), case.to(dtype, DEVICE), mask_TT)


def check_close(layout: PackedLayout, case: Case, window: int | None = None, tolerance: float = 1e-5) -> None:
    """In float32, where eager float32 attention is exact or overflows and gives no budget."""
    mask_TT = dense_mask(layout, window).to(DEVICE)
    wanted = output_and_gradients(lambda case: dense_attention(case, mask_TT), case.to(torch.float64, DEVICE))
    got = output_and_gradients(attend(layout, window), case.to(torch.float32, DEVICE))
    assert_close([x.double() for x in got], wanted, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [GROUPS, CHAIN, DOCUMENTS], ids=["groups", "chain", "documents"])
def test_forests(layout: PackedLayout, dtype: torch.dtype):
    check(layout, make_case(layout, heads=(2, 1), head_dim=16), dtype)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 8])
def test_features_together(window: int | None, softcap: float | None, has_sinks: bool):
    case = make_case(GROUPS, heads=(2, 1), head_dim=16, softcap=softcap, has_sinks=has_sinks)
    check(GROUPS, case, torch.float32, window)


@pytest.mark.parametrize("window", [1, 16, 17, 30])
def test_windows_count_logical_positions(window: int):
    """A response continues at its prompt's end, whatever row it is stored in."""
    check_close(GROUPS, make_case(GROUPS, heads=(1, 1), head_dim=16), window)


@pytest.mark.parametrize("head_dims", [(8, 8), (20, 20), (24, 16), (16, 40), (96, 96)])
def test_head_dims(head_dims: tuple[int, int]):
    case = make_case(GROUPS, heads=(2, 1), head_dim=head_dims[0], v_head_dim=head_dims[1])
    check(GROUPS, case, torch.float16)


def test_the_largest_head_dim():
    """Megatron-LM#7417: packed input with heads of 256 and more."""
    layout = make_groups((9, [4, 12]))
    check(layout, make_case(layout, heads=(2, 1), head_dim=512), torch.float16)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)])
def test_heads(heads: tuple[int, int]):
    check(CHAIN, make_case(CHAIN, heads=heads, head_dim=16), torch.float32)


@given(forests, st.sampled_from([None, 4]), st.integers(0, 2**16))
@settings(max_examples=12)
def test_any_forest(layout: PackedLayout, window: int | None, seed: int):
    check_close(layout, make_case(layout, heads=(2, 1), head_dim=8, has_sinks=True, seed=seed), window)


def test_a_prompt_of_few_rows_below_many_is_split_and_added_up():
    layout = make_groups((10, [9] * 8))
    plan = AttentionPlan.build(layout)
    assert build_key_schedule(plan, 16, 16, 8).num_slots > 1, "the case no longer splits a tile"
    check(layout, make_case(layout, heads=(2, 1), head_dim=16), torch.float32)


def test_gradients_are_the_same_bits_in_every_run():
    layout = make_groups((10, [9] * 8))
    case = make_case(layout, heads=(2, 1), head_dim=16).to(torch.float32, DEVICE)
    first, second = (output_and_gradients(attend(layout), case) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [None, 8])
def test_everything_is_written(monkeypatch: pytest.MonkeyPatch, window: int | None):
    """Outputs and workspaces start as NaN."""

    def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = empty(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    layout = make_groups((20, [9] * 6))
    case = make_case(layout, heads=(2, 1), head_dim=16, has_sinks=True).to(torch.float32, DEVICE)
    assert all(x.isfinite().all() for x in output_and_gradients(attend(layout, window), case))


def test_strided_and_misaligned_inputs():
    """A slice of a fused projection, a transposed one, and one whose rows start at odd addresses."""
    case = make_case(GROUPS, heads=(2, 1), head_dim=16).to(torch.float32, DEVICE)
    T = GROUPS.num_rows
    fused = torch.randn(T, 100, device=DEVICE)
    fused[:, 3:35] = case.q_THD.reshape(T, 32)
    q_THD = fused[:, 3:35].view(T, 2, 16)
    k_THD = case.k_THD.transpose(0, 1).contiguous().transpose(0, 1)
    v_THE = case.v_THE.transpose(1, 2).contiguous().transpose(1, 2)
    dout_THE = case.dout_THE.transpose(0, 1).contiguous().transpose(0, 1)
    got = output_and_gradients(attend(GROUPS), case)
    leaves = [x.detach().requires_grad_() for x in (q_THD, k_THD, v_THE)]
    out_THE = attend(GROUPS)(Case(leaves[0], leaves[1], leaves[2], None, dout_THE))
    again = [out_THE, *torch.autograd.grad(out_THE, leaves, dout_THE)]
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


def test_numbers_over_the_range_of_exp_do_not_overflow():
    """Scores of some hundreds, and a row whose later keys outweigh its earlier ones by far."""
    case = make_case(GROUPS, heads=(1, 1), head_dim=16, softmax_scale=20.0)
    check_close(GROUPS, case, tolerance=1e-4)  # float32 keeps the scores to 1e-5 of one


def test_what_rounded_probabilities_add_up_to_is_what_outputs_are_divided_by():
    """fp16 probabilities do not add up to the sum of exact ones, which FlashAttention divides by."""
    layout = pack_documents([[1] * 16] * 8)
    case, mask_TT = make_case(layout, heads=(2, 2), head_dim=32), dense_mask(layout).to(DEVICE)
    case16, case64 = case.to(torch.float16, DEVICE), case.to(torch.float16, DEVICE).to(torch.float64, DEVICE)
    exact_THE = dense_attention(case64, mask_TT)
    scores_HTT = torch.einsum("qhd,khd->hqk", case64.q_THD, case64.k_THD) * case64.q_THD.shape[2] ** -0.5
    scores_HTT = scores_HTT.masked_fill(~mask_TT, -torch.inf)
    probs_HTT = (scores_HTT - scores_HTT.amax(dim=2, keepdim=True)).exp()
    flash_THE = torch.einsum("hqk,khd->qhd", probs_HTT.half().double(), case64.v_THE)
    flash_THE = (flash_THE / probs_HTT.sum(dim=2).T[:, :, None]).half()

    def rms(out_THE: Tensor) -> float:
        return (out_THE.double() - exact_THE).square().mean().sqrt().item()

    assert rms(attend(layout)(case16)) < 0.995 * rms(flash_THE)


@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_sinks_of_any_strides(kind: str):
    case = make_case(GROUPS, has_sinks=True).to(torch.float32, DEVICE)
    assert case.sinks_H is not None
    if kind == "strided":
        sinks_H = torch.stack([case.sinks_H, torch.full_like(case.sinks_H, 9.0)], dim=1)[:, 0]
    else:
        sinks_H = case.sinks_H[:1].expand(case.sinks_H.shape[0])
    attention, mask_TT = attend(GROUPS), dense_mask(GROUPS).to(DEVICE)
    out_THE = attention(replace(case, sinks_H=sinks_H))
    exact_THE = dense_attention(replace(case, sinks_H=sinks_H.clone()), mask_TT)
    assert_close([out_THE], [exact_THE], 1e-5)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0, 1e3, 1e6, 1e20, 1e30])
def test_a_softcap_of_any_size_loses_no_digits(softcap: float):
    """Far above the scores it is no cap at all; the difference of two numbers of its size would be noise."""
    check(GROUPS, make_case(GROUPS, head_dim=32, softcap=softcap), torch.float32)


@pytest.mark.parametrize("which", ["one query head", "one key head", "one row"])
def test_dims_of_size_one_have_any_stride(which: str):
    """torch calls them contiguous whatever their stride; the copy engine asks for aligned ones."""
    layout = make_groups((1, [])) if which == "one row" else make_groups((9, [5]))
    heads = {"one query head": (1, 1), "one key head": (3, 1), "one row": (3, 3)}[which]
    case = make_case(layout, heads=heads, head_dim=8).to(torch.float32, DEVICE)

    def odd(tensor: Tensor) -> Tensor:
        if which == "one row":
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    strange = replace(
        case, q_THD=odd(case.q_THD), k_THD=odd(case.k_THD), v_THE=odd(case.v_THE), dout_THE=odd(case.dout_THE)
    )
    plain, odd_results = (output_and_gradients(attend(layout), x) for x in (case, strange))
    assert all(torch.equal(x, y) for x, y in zip(plain, odd_results, strict=True))


@pytest.mark.full
def test_strides_past_32_bits():
    """A head times its stride: a gradient with heads first passes 2^31 elements at 541,201 rows of 32 heads of 128."""
    layout = make_groups((3, []))
    num_heads, dim, stride = 32, 8, 72_000_000
    case = make_case(layout, heads=(num_heads, num_heads), head_dim=dim).to(torch.float16, DEVICE)
    storage = torch.empty(stride * (num_heads - 1) + 3 * dim, dtype=torch.float16, device=DEVICE)
    far_THE = storage.as_strided((3, num_heads, dim), (dim, stride, 1)).copy_(case.dout_THE)
    plain, far = (output_and_gradients(attend(layout), x) for x in (case, replace(case, dout_THE=far_THE)))
    assert all(torch.equal(x, y) for x, y in zip(plain, far, strict=True))
