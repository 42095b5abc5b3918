"""FlashAttention-2 levels on a GPU, against float64."""

# Shape letters: T rows.

import pytest
import torch
from tests.attention.oracle import (
    Case,
    assert_within_error_budget,
    dense_attention,
    dense_mask,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)
from torch import Tensor

from ratoon.attention import AttentionPlan, available_impls, forest_attention, resolve_impl
from ratoon.attention.impls import AttentionRequest
from ratoon.layout import PackedLayout, pack_documents

pytestmark = pytest.mark.gpu

FORESTS = {
    "one group": make_groups((300, [64] * 8)),
    "ragged groups": make_groups((129, [7, 1, 300, 0]), (1, [1]), (64, [33, 128])),
    "empty and single": make_groups((1, []), (5, [0]), (1, [1])),
    "deep chain": make_chain(6, 21),
    "documents": pack_documents([[1] * n for n in (1, 130, 17, 256)]),
}


def attend(layout: PackedLayout, impl: str, window: int | None = None):
    plan = AttentionPlan.build(layout, "cuda", window)

    def attention(case: Case) -> Tensor:
        return forest_attention(
            case.q_THD,
            case.k_THD,
            case.v_THE,
            plan,
            sinks_H=case.sinks_H,
            softcap=case.softcap,
            softmax_scale=case.softmax_scale,
            impl=impl,
        )

    return attention


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (36, 20), (256, 256)])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (9, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORESTS)
def test_flash_stays_in_the_error_budget(
    name: str, dtype: torch.dtype, heads: tuple[int, int], head_dims: tuple[int, int], has_sinks: bool
):
    layout = FORESTS[name]
    case = make_case(layout, heads=heads, head_dim=head_dims[0], v_head_dim=head_dims[1], has_sinks=has_sinks)
    assert_within_error_budget(attend(layout, "flash"), case.to(dtype, "cuda"), dense_mask(layout).cuda())


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (17, 3.0)])
def test_reference_is_exact_in_float64(name: str, window: int | None, softcap: float | None):
    layout = FORESTS[name]
    mask_TT = dense_mask(layout, window).cuda()
    case = make_case(layout, has_sinks=True, softcap=softcap).to(torch.float64, "cuda")
    exact = output_and_gradients(lambda case: dense_attention(case, mask_TT), case)
    ours = output_and_gradients(attend(layout, "reference", window), case)
    for x, z in zip(ours, exact, strict=True):
        assert (x - z).abs().max() <= 1e-10 * max(z.abs().max().item(), 1.0)


def test_no_layer_waits_for_the_device():
    """All lengths are known on the host when the plan is built."""
    layout = FORESTS["ragged groups"]
    case = make_case(layout, has_sinks=True).to(torch.bfloat16, "cuda")
    attention = attend(layout, "flash")
    output_and_gradients(attention, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output_and_gradients(attention, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_changing_one_sequence_leaves_the_others_bitwise_equal():
    """Changing sequence 1 moved sequence 2: NeMo-RL#4167, NeMo-RL#2105."""
    layout = FORESTS["one group"]
    case = make_case(layout).to(torch.bfloat16, "cuda")
    with torch.no_grad():
        before = attend(layout, "flash")(case)
        changed = slice(int(layout.segment_offsets[2]), int(layout.segment_offsets[3]))
        for tensor in (case.q_THD, case.k_THD, case.v_THE):
            tensor[changed] = 3 * torch.randn_like(tensor[changed])
        after = attend(layout, "flash")(case)
    assert torch.equal(before[: changed.start], after[: changed.start])
    assert torch.equal(before[changed.stop :], after[changed.stop :])
    assert not torch.equal(before[changed], after[changed])


def test_no_rows():
    """Varlen kernels stop with "batch size must be positive": verl#1270."""
    layout = pack_documents([])
    case = make_case(layout, has_sinks=True).to(torch.bfloat16, "cuda")
    got = output_and_gradients(attend(layout, "flash"), case)
    assert got[0].shape == (0, 4, 8) and got[4].eq(0).all()


def test_memory_is_linear_in_rows():
    def peak_bytes(num_responses: int) -> int:
        layout = make_groups((4096, [512] * num_responses))
        case = make_case(layout, heads=(8, 2), head_dim=64).to(torch.bfloat16, "cuda")
        attention = attend(layout, "flash")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output_and_gradients(attention, case)
        return torch.cuda.max_memory_allocated() - before

    assert peak_bytes(24) / peak_bytes(8) <= 2.2, "8192 and 16384 rows"


def test_auto_takes_flash():
    assert {status.impl: status for status in available_impls() if status.provider == "torch-fa2"}["flash"].is_available
    request = AttentionRequest(device_type="cuda", dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    assert resolve_impl(request).provider == "torch-fa2"
