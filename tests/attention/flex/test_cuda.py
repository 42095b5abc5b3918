"""FlexAttention on a GPU, on Triton and on FlashAttention-4: error budget, graphs, reproducibility, memory."""

import importlib.util
from collections.abc import Callable
from typing import Any

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
from torch import Tensor
from torch._dynamo.utils import counters

from ratoon.attention import AttentionPlan
from ratoon.attention.flex.attention import flex_attention
from ratoon.attention.kernel import Scoring
from ratoon.layout import PackedLayout, pack_documents

pytestmark = pytest.mark.gpu


def has_fa4() -> bool:
    """Where Hopper and Blackwell are, and the package."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10, 11):
        return False
    return (
        importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None
    )


BACKENDS = [
    pytest.param("triton", id="triton"),
    pytest.param("fa4", id="fa4", marks=pytest.mark.skipif(not has_fa4(), reason="no flash-attn-4, or not its GPU")),
]

FORESTS = {
    "one group": make_groups((300, [64] * 8)),
    "ragged groups": make_groups((129, [7, 1, 300, 0]), (1, [1]), (64, [33, 128])),
    "small": make_groups((1, []), (5, [0]), (1, [1])),
    "deep chain": make_chain(6, 21),
    "documents": pack_documents([[1] * n for n in (1, 130, 17, 256)]),
}


def attend(layout: PackedLayout, backend: Any, window: int | None = None) -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout, "cuda", window)

    def run(case: Case) -> Tensor:
        scoring = Scoring(softmax_scale=case.q_THD.shape[2] ** -0.5, softcap=case.softcap)
        return flex_attention(case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan, scoring, backend=backend)

    return run


def check(name: str, backend: str, case: Case, window: int | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    layout = FORESTS[name]
    mask_TT = dense_mask(layout, window).cuda()
    assert_within_error_budget(attend(layout, backend, window), case.to(dtype, "cuda"), mask_TT)


# Every kind of call takes seconds to compile, so that few are asked for, and tests share them.
@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_forest_stays_in_the_error_budget(backend: str, name: str):
    check(name, backend, make_case(FORESTS[name], heads=(8, 2), head_dim=128))


@pytest.mark.parametrize("window", [1, 5, 17, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_caps_and_sinks_stay_in_the_error_budget(backend: str, window: int):
    for name in FORESTS:
        case = make_case(FORESTS[name], heads=(8, 2), head_dim=64, has_sinks=backend == "triton", softcap=3.0)
        check(name, backend, case, window)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("backend", "head_dims", "heads", "dtype"),
    [
        ("triton", (192, 128), (4, 4), torch.bfloat16),
        pytest.param("triton", (256, 256), (4, 2), torch.float16, marks=full),
        pytest.param("triton", (36, 20), (9, 3), torch.bfloat16, marks=full),
        pytest.param("triton", (8, 8), (4, 1), torch.bfloat16, marks=full),
        pytest.param("triton", (32, 32), (2, 1), torch.float32, marks=full),
        pytest.param("fa4", (64, 64), (9, 3), torch.float16, marks=full),
        pytest.param("fa4", (36, 20), (4, 4), torch.bfloat16, marks=full),
        pytest.param("fa4", (96, 96), (4, 1), torch.bfloat16, marks=full),
        pytest.param("fa4", (8, 8), (4, 2), torch.bfloat16, marks=full),
    ],
)
def test_heads_and_dtypes(backend: str, head_dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype):
    if backend == "fa4" and not has_fa4():
        pytest.skip("no flash-attn-4, or not its GPU")
    layout = FORESTS["ragged groups"]
    case = make_case(layout, heads=heads, head_dim=head_dims[0], v_head_dim=head_dims[1])
    check("ragged groups", backend, case, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_compile_nothing_anew(backend: str):
    """Compiled for one shape, attention stalled for seconds at every other: unsloth#6871, Automodel#2532.

    Forward and backward of ten layouts are one graph each.
    """
    counts: list[int] = []
    for n in range(10):
        layout = make_groups((100 + 77 * n, [50 * n, 30, 64]))
        case = make_case(layout, heads=(8, 2), head_dim=128).to(torch.bfloat16, "cuda")
        output_and_gradients(attend(layout, backend), case)
        counts.append(counters["stats"]["unique_graphs"])
    assert len(set(counts)) == 1, f"graphs after each layout: {counts}"


def test_gradients_are_bitwise_equal_in_every_run():
    layout = make_groups((1000, [300] * 6), (64, [33, 128]))
    case = make_case(layout, heads=(8, 2), head_dim=64, has_sinks=True, softcap=3.0).to(torch.bfloat16, "cuda")
    attention = attend(layout, "triton", window=700)
    first = output_and_gradients(attention, case)
    for _ in range(9):
        assert all(torch.equal(x, y) for x, y in zip(first, output_and_gradients(attention, case), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_layer_waits_for_the_device(backend: str):
    layout = FORESTS["ragged groups"]
    case = make_case(layout, heads=(8, 2), head_dim=128).to(torch.bfloat16, "cuda")
    attention = attend(layout, backend)
    output_and_gradients(attention, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output_and_gradients(attention, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_linear_in_rows():
    def peak_bytes(num_responses: int) -> int:
        layout = make_groups((4096, [512] * num_responses))
        case = make_case(layout, heads=(8, 2), head_dim=128).to(torch.bfloat16, "cuda")
        attention = attend(layout, "triton")
        output_and_gradients(attention, case)  # builds the tile lists
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output_and_gradients(attention, case)
        return torch.cuda.max_memory_allocated() - before

    assert peak_bytes(24) / peak_bytes(8) <= 2.2, "8192 and 16384 rows"
