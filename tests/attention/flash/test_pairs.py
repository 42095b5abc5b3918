"""Every provider's kernels, forward and backward, against dense softmax, with eager stand-ins for what it calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.fake_varlen import fake_varlen_kernels
from tests.attention.flash.fake_fa3 import FakeFa3
from tests.attention.flash.fake_fa4 import FakeFa4
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

from ratoon.attention import AttentionPlan
from ratoon.attention.autograd import KernelPair, attend
from ratoon.attention.flash import fa2, fa3, fa4, fa4_shapes
from ratoon.attention.kernel import BackwardKernel, ForwardKernel, Scoring
from ratoon.layout import PackedLayout, pack_documents

FORWARD: dict[str, ForwardKernel] = {
    "fa2": fa2.forward,
    "fa3": fa3.forward,
    "fa4": fa4.forward,
    "fa4 levels": fa4.forward_by_levels,
}
BACKWARD: dict[str, BackwardKernel] = {
    "fa2": fa2.backward,
    "fa3": fa3.backward,
    "fa4": fa4.backward,
    "fa4 levels": fa4.backward,
}
FOREST = make_groups((6, [3, 2, 5]), (1, [4]), (2, []))


@contextmanager
def all_installed(fake_fa4: FakeFa4 | None = None, capability: int = 9) -> Iterator[None]:
    with ExitStack() as stack:
        for fake in (fake_varlen_kernels.installed(), FakeFa3().installed()):
            stack.enter_context(fake)
        stack.enter_context((fake_fa4 or FakeFa4()).installed(capability))
        yield


@contextmanager
def tiles_of(rows: int, keys: int) -> Iterator[None]:
    """Forests of a few rows have many tiles."""
    tile = fa4_shapes.Tile(rows, keys)
    with patch.object(fa4_shapes, "forward_build", lambda *dims: fa4_shapes.ForwardBuild(lists=tile)):
        yield


def attention(
    layout: PackedLayout,
    forward: ForwardKernel,
    backward: BackwardKernel,
    *,
    deterministic: bool = False,
    device: str = "cpu",
) -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout, device)

    def attend_case(case: Case) -> Tensor:
        scale = 1 / case.q_THD.shape[2] ** 0.5 if case.softmax_scale is None else case.softmax_scale
        return attend(
            *(case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan),
            Scoring(softmax_scale=scale, softcap=case.softcap),
            KernelPair(forward, backward),
            deterministic=deterministic,
        )

    return attend_case


def check(layout: PackedLayout, case: Case, forward: str, backward: str, *, tolerance: float = 1e-10) -> None:
    got = output_and_gradients(attention(layout, FORWARD[forward], BACKWARD[backward]), case)
    mask_TT = dense_mask(layout)
    assert_close(got, output_and_gradients(lambda case: dense_attention(case, mask_TT), case), tolerance)


calls = given(
    layout=forests,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (3, 1)]),
    head_dims=st.sampled_from([(8, 8), (5, 5), (6, 4), (4, 12), (24, 16)]),
    has_cap=st.booleans(),
    seed=st.integers(0, 2**16),
    tile=st.sampled_from([(1, 1), (2, 3), (5, 2), (4, 4), (64, 64)]),
)


def check_call(
    provider: str,
    layout: PackedLayout,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    has_cap: bool,
    seed: int,
    tile: tuple[int, int],
) -> None:
    case = make_case(
        layout,
        heads=heads,
        head_dim=head_dims[0],
        v_head_dim=head_dims[1],
        softcap=3.0 if has_cap and provider != "fa2" else None,
        softmax_scale=0.7,
        seed=seed,
    )
    with all_installed(), tiles_of(*tile):
        check(layout, case, provider, provider)


@pytest.mark.parametrize("provider", FORWARD)
@calls
@settings(max_examples=12)
def test_equals_dense_softmax(provider: str, **call: Any):
    check_call(provider, **call)


@pytest.mark.full
@pytest.mark.parametrize("provider", FORWARD)
@calls
@settings(max_examples=200)
def test_equals_dense_softmax_on_many_forests(provider: str, **call: Any):
    check_call(provider, **call)


@pytest.mark.parametrize("provider", FORWARD)
def test_sinks(provider: str):
    """Counted once, whatever the number of levels. FA4 gets them in fp32."""
    for layout in (FOREST, make_chain(3, 2), pack_documents([[1], [1, 1]])):
        case = make_case(layout, has_sinks=True)
        with all_installed(), tiles_of(3, 2):
            check(layout, case, provider, provider, tolerance=1e-6 if provider.startswith("fa4") else 1e-10)


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("forward", FORWARD)
def test_any_forward_serves_any_backward(forward: str, backward: str):
    with all_installed(), tiles_of(3, 2):
        check(FOREST, make_case(FOREST, heads=(4, 2), head_dim=8, v_head_dim=8), forward, backward)


@pytest.mark.parametrize("capability", [9, 10])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (160, 96), (200, 64)])
def test_fa4_head_dims_of_every_gpu(head_dims: tuple[int, int], capability: int):
    """The tiles are the real ones, which are longer than the forest."""
    layout = make_groups((4, [3, 2]))
    for heads in ((2, 2), (2, 1)):
        case = make_case(layout, heads=heads, head_dim=head_dims[0], v_head_dim=head_dims[1])
        with all_installed(capability=capability):
            check(layout, case, "fa4", "fa4")


@pytest.mark.parametrize(
    ("deterministic", "capability", "head_dim", "launches"),
    [
        (False, 9, 64, ["blocks", "own runs", "level", "level"]),
        (True, 9, 64, ["blocks", "own runs", "level", "level"]),
        (False, 10, 256, ["own runs", "level", "level", "own runs", "level", "level"]),
    ],
)
def test_fa4_launches(deterministic: bool, capability: int, head_dim: int, launches: list[str]):
    """One of all rows where a kernel that walks lists serves, else one a level, whatever the number of groups."""
    layout = make_tree([2, 3, 1, 1, 2, 4, 3], [-1, 0, 1, 1, 0, -1, 5])
    fake = FakeFa4()
    with all_installed(fake, capability):
        attend_case = attention(layout, fa4.forward, fa4.backward, deterministic=deterministic)
        output_and_gradients(attend_case, make_case(layout, head_dim=head_dim))
    assert fake.calls == launches


@pytest.mark.parametrize("provider", FORWARD)
def test_vectors_that_wide_loads_cannot_start_at(provider: str):
    """Rows cut from a wider projection start anywhere; kernels load 16 bytes at a time, and do not check."""
    case = make_case(FOREST, heads=(2, 2), head_dim=8)
    wide = torch.zeros(FOREST.num_rows, 2, 9, dtype=torch.float64)
    wide[..., 1:] = case.q_THD
    moved = Case(wide[..., 1:], case.k_THD, case.v_THE, None, torch.ones(1, 1, 1).double().expand_as(case.dout_THE))
    with all_installed():
        check(FOREST, moved, provider, provider)
