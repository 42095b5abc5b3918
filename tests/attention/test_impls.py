"""What a call gets is named, explained, and never something else in silence."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.attention.oracle import make_case, make_groups

from ratoon.attention import AttentionPlan, AttentionRequest, available_impls, forest_attention, resolve_impl

LAYOUT = make_groups((3, [2, 1]))


def request_of(**changes: object) -> AttentionRequest:
    fields: dict[str, object] = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "v_head_dim": 64}
    return AttentionRequest(**(fields | changes))  # pyright: ignore[reportArgumentType]


def test_auto_takes_flash_and_says_so():
    choice = resolve_impl(request_of())
    assert (choice.impl, choice.provider) == ("flash", "torch-cpu")
    assert "flash (torch-cpu)" in choice.reason


@pytest.mark.parametrize("feature", ["sliding window", "softcap"])
def test_auto_takes_the_reference_for_what_flash_lacks_and_says_why(feature: str):
    choice = resolve_impl(request_of(features=frozenset({feature})))
    assert choice.impl == "reference"
    assert f"flash (torch-cpu) has no {feature}" in choice.reason


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (request_of(features=frozenset({"softcap"})), "softcap"),
        (request_of(features=frozenset({"sliding window"})), "sliding window"),
        (request_of(device_type="mps"), "device mps"),
        (request_of(dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (request_of(device_type="cuda", dtype=torch.float32), "dtype torch.float32"),
        (request_of(device_type="cuda", dtype=torch.bfloat16, head_dim=512), "head dim 512 (at most 256)"),
        (
            request_of(device_type="cuda", dtype=torch.bfloat16, features=frozenset({"deterministic backward"})),
            "deterministic backward",
        ),
    ],
)
def test_flash_asked_for_by_name_is_refused_by_name(request_: AttentionRequest, feature: str):
    """And `auto` takes what can. Megatron-LM#7417: no back end at all for packed input with large heads."""
    with pytest.raises(ValueError, match="impl='flash'") as caught:
        resolve_impl(request_, "flash")
    assert feature in str(caught.value)
    if request_.dtype != torch.float8_e4m3fn:
        assert "can: reference (eager)" in str(caught.value)
        assert resolve_impl(request_).impl == "reference"
    else:
        assert "can: none" in str(caught.value)


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_impls_to_come_are_named(impl: str):
    with pytest.raises(ValueError, match=f"impl='{impl}' cannot run.*not available.*flash \\(torch-cpu\\)"):
        resolve_impl(request_of(), impl)


def test_unknown_impl_lists_the_known():
    with pytest.raises(ValueError, match="'auto', 'reference', 'flash', 'flex', 'triton', got 'sdpa'"):
        resolve_impl(request_of(), "sdpa")


def test_available_impls_say_why_not():
    """verl#5474: which one can be used where?"""
    statuses = {(status.impl, status.provider): status for status in available_impls()}
    assert statuses["reference", "eager"].is_available and statuses["flash", "torch-cpu"].is_available
    assert not statuses["flex", ""].is_available and "not available" in statuses["flex", ""].reason
    fa2 = statuses["flash", "torch-fa2"]
    assert fa2.is_available == torch.cuda.is_available()
    assert all(status.reason for status in statuses.values())


def test_the_op_refuses_what_its_plan_asks_for():
    case = make_case(LAYOUT)
    plan = AttentionPlan.build(LAYOUT, window=2)
    with pytest.raises(ValueError, match=r"flash \(torch-cpu\) has no sliding window"):
        forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, impl="flash")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_THD": torch.zeros(1, 6, 4, 8)}, "must be .rows, heads, head dim."),
        ({"k_THD": torch.zeros(5, 2, 8)}, "k_THD has 5 rows, but its plan was built for a layout of 6"),
        ({"v_THD": torch.zeros(6, 2, 8, dtype=torch.float64)}, "one floating dtype, got v_THD in torch.float64"),
        ({"k_THD": torch.zeros(6, 2, 7)}, "k must have q's head dim"),
        ({"v_THD": torch.zeros(6, 4, 8)}, "v as many heads as k"),
        ({"k_THD": torch.zeros(6, 3, 8), "v_THD": torch.zeros(6, 3, 8)}, "must divide the number of query heads"),
        ({"k_THD": torch.zeros(6, 0, 8), "v_THD": torch.zeros(6, 0, 8)}, "no dim may be empty"),
        ({"sinks_H": torch.zeros(3)}, "sinks_H must hold one floating number for each of 4 query heads"),
        ({"sinks_H": torch.zeros(4, dtype=torch.int64)}, "of torch.int64"),
        ({"q_THD": torch.zeros(6, 4, 8, device="meta")}, "q_THD is on meta, but its plan was built for cpu"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be positive and finite, got nan"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive and finite, got 0.0; pass None"),
        ({"softmax_scale": -0.5, "impl": "flash"}, "softmax_scale must be positive and finite, got -0.5"),
        ({"q_THD": np.zeros((6, 4, 8))}, "q_THD must be a torch.Tensor, got ndarray"),
        ({"sinks_H": [0.0] * 4}, "sinks_H must be a torch.Tensor, got list"),
        ({"plan": None}, r"plan must be an AttentionPlan, got NoneType; .*AttentionPlan.build\(layout\)"),
        ({"plan": LAYOUT}, "plan must be an AttentionPlan, got PackedLayout"),
        ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        ({"impl": "flash", "softcap": 3.0}, "has no softcap"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, object], message: str):
    given: dict[str, object] = {
        "q_THD": torch.zeros(6, 4, 8),
        "k_THD": torch.zeros(6, 2, 8),
        "v_THD": torch.zeros(6, 2, 8),
        "plan": AttentionPlan.build(LAYOUT),
    }
    with pytest.raises(ValueError, match=message):
        forest_attention(**(given | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_a_window_is_a_positive_number_of_tokens(window: object):
    with pytest.raises(ValueError, match="window must be a number of tokens, at least 1"):
        AttentionPlan.build(LAYOUT, window=window)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layout", [None, [], np.arange(3)])
def test_a_plan_is_of_a_layout(layout: object):
    with pytest.raises(ValueError, match=r"layout must be a PackedLayout, got .*pack_groups"):
        AttentionPlan.build(layout)  # pyright: ignore[reportArgumentType]


def test_importing_the_package_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path}; import ratoon.attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
