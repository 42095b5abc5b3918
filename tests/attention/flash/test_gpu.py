"""The real kernels of every provider that is there, and both ways of FA4, against float64."""

import pytest
import torch
from tests.attention.flash.test_pairs import BACKWARD, FORWARD, attention
from tests.attention.oracle import (
    assert_within_error_budget,
    dense_mask,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)

from ratoon.attention import AttentionPlan
from ratoon.attention.autograd import KernelPair, attend
from ratoon.attention.flash.providers import why_not_here
from ratoon.attention.kernel import Scoring
from ratoon.layout import PackedLayout, pack_documents

pytestmark = pytest.mark.gpu

PROVIDERS = {"fa2": "torch-fa2", "fa3": "fa3", "fa4": "fa4", "fa4 levels": "fa4"}
FORESTS = {
    "ragged groups": make_groups((129, [7, 1, 300, 0]), (1, [1]), (64, [33, 128])),
    "empty and single": make_groups((1, []), (5, [0]), (1, [1])),
    "deep chain": make_chain(6, 21),
    "documents": pack_documents([[1] * n for n in (1, 130, 17, 256)]),
}


def skip_without(*names: str) -> None:
    for name in names:
        if reason := why_not_here(PROVIDERS[name]):
            pytest.skip(reason)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (9, 3)])
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (36, 20), (256, 256)])
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_stays_in_the_error_budget(provider: str, forest: str, head_dims: tuple[int, int], heads: tuple[int, int]):
    skip_without(provider)
    layout = FORESTS[forest]
    case = make_case(layout, heads=heads, head_dim=head_dims[0], v_head_dim=head_dims[1], has_sinks=True)
    attend_case = attention(layout, FORWARD[provider], BACKWARD[provider], device="cuda")
    assert_within_error_budget(attend_case, case.to(torch.bfloat16, "cuda"), dense_mask(layout).cuda())


@pytest.mark.parametrize("provider", ["fa3", "fa4", "fa4 levels"])
def test_caps(provider: str):
    skip_without(provider)
    layout = FORESTS["ragged groups"]
    case = make_case(layout, heads=(8, 2), head_dim=64, softcap=5.0).to(torch.bfloat16, "cuda")
    attend_case = attention(layout, FORWARD[provider], BACKWARD[provider], device="cuda")
    assert_within_error_budget(attend_case, case, dense_mask(layout).cuda())


@pytest.mark.parametrize("forward", PROVIDERS)
@pytest.mark.parametrize("backward", PROVIDERS)
def test_any_forward_serves_any_backward(forward: str, backward: str):
    skip_without(forward, backward)
    layout = FORESTS["ragged groups"]
    case = make_case(layout, heads=(8, 2), head_dim=128).to(torch.bfloat16, "cuda")
    attend_case = attention(layout, FORWARD[forward], BACKWARD[backward], device="cuda")
    assert_within_error_budget(attend_case, case, dense_mask(layout).cuda())


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("provider", ["fa3", "fa4"])
def test_fixed_order_gives_equal_bits(provider: str, heads: tuple[int, int]):
    skip_without(provider)
    layout = make_groups((700, [130, 64, 300]), (200, [64] * 6))
    case = make_case(layout, heads=heads, head_dim=128).to(torch.bfloat16, "cuda")
    attend_case = attention(layout, FORWARD[provider], BACKWARD[provider], deterministic=True, device="cuda")
    first = output_and_gradients(attend_case, case)
    for _ in range(9):
        again = output_and_gradients(attend_case, case)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_layer_waits_for_the_device(provider: str):
    """All that the device's answer could decide is known on the host when the plan is built."""
    skip_without(provider)
    layout = FORESTS["deep chain"]
    case = make_case(layout, heads=(4, 2), head_dim=64).to(torch.bfloat16, "cuda")
    attend_case = attention(layout, FORWARD[provider], BACKWARD[provider], device="cuda")
    output_and_gradients(attend_case, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output_and_gradients(attend_case, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("provider", ["fa4", "fa4 levels"])
def test_memory_does_not_grow_with_the_number_of_responses(provider: str):
    """For a fixed number of rows: no tensor of N * P rows exists."""
    skip_without(provider)

    def peak_bytes(layout: PackedLayout) -> int:
        plan = AttentionPlan.build(layout, "cuda")
        case = make_case(layout, heads=(8, 2), head_dim=128).to(torch.bfloat16, "cuda")
        kernels, scoring = KernelPair(FORWARD[provider], BACKWARD[provider]), Scoring(softmax_scale=0.1)

        def run() -> None:
            q_THD, k_THD, v_THE = (x.clone().requires_grad_() for x in (case.q_THD, case.k_THD, case.v_THE))
            out_THE = attend(q_THD, k_THD, v_THE, None, plan, scoring, kernels, deterministic=False)
            out_THE.backward(case.dout_THE)

        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    few, many = peak_bytes(make_groups((4096, [2048] * 4))), peak_bytes(make_groups((4096, [128] * 64)))
    assert many <= 1.2 * few
