"""What a call gets is named, explained, and never something else in silence."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.attention.oracle import make_case, make_groups

from ratoon.attention import (
    AttentionPlan,
    AttentionRequest,
    available_impls,
    explain_choice,
    forest_attention,
    impls,
    resolve_impl,
    specs,
)
from ratoon.attention.choice_table import ARCHITECTURES, architecture_of, parse_choices, shipped_rows
from ratoon.attention.impls import IMPL_NAMES, check_row, forget_choices
from ratoon.attention.request import FEATURES, Feature
from ratoon.attention.specs import OF_BACKWARD, OF_FORWARD, SPECS, spec_named
from ratoon.models.config import AttentionImpl

LAYOUT = make_groups((3, [2, 1]))

GPU_IMPLS = ("flash-fa4", "flash-fa3", "triton", "triton-adding", "flash-fa2", "flex-triton", "flex-fa4", "reference")

Machine = Callable[..., None]


@pytest.fixture(autouse=True)
def _compiled_kernels(monkeypatch: pytest.MonkeyPatch):
    """As users have it: Triton's interpreter, which other tests need, would say that `triton` runs on the CPU only."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine("sm90", "triton", ...): a machine of that architecture on which just those implementations run."""

    def become(architecture: str, *names: str) -> None:
        monkeypatch.setattr(specs, "why_not_here", lambda name: None if name in names else f"no {name} in this test")
        monkeypatch.setattr(impls, "architecture_of", lambda device_type: architecture)
        forget_choices()

    return become


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    """table(text): the choices of `auto` for one test."""

    def become(text: str) -> None:
        monkeypatch.setattr(impls, "choice_table", lambda: parse_choices(text))
        forget_choices()

    return become


def request_of(*features: Feature, **changes: object) -> AttentionRequest:
    fields: dict[str, object] = {"device_type": "cpu", "dtype": torch.float32, "head_dim": 64, "v_head_dim": 64}
    return AttentionRequest(**(fields | {"features": frozenset(features)} | changes))  # pyright: ignore[reportArgumentType]


def on_gpu(*features: Feature, dim: int = 128, v_dim: int | None = None, **changes: object) -> AttentionRequest:
    fields: dict[str, object] = {"device_type": "cuda", "dtype": torch.bfloat16}
    return request_of(*features, **(fields | {"head_dim": dim, "v_head_dim": v_dim or dim} | changes))


def test_auto_takes_flash_and_says_so():
    choice = resolve_impl(request_of())
    assert (choice.forward, choice.backward, choice.impl, choice.provider) == (
        *("flash-cpu", "flash-cpu"),
        *("flash", "torch-cpu"),
    )
    assert choice.reason.startswith("choices.toml, row 1 for cpu: ")


@pytest.mark.parametrize("feature", ["sliding window", "softcap"])
def test_auto_takes_the_reference_for_what_flash_lacks_and_says_why(feature: Feature):
    choice = resolve_impl(request_of(feature))
    assert choice.kernels == "forward reference, backward reference"
    assert f"flash-cpu has no {feature}" in choice.reason


@pytest.mark.parametrize(
    ("request_", "forward", "backward"),
    [
        (on_gpu(), "flash-fa4", "triton-adding"),
        (on_gpu("sinks"), "flash-fa4", "triton-adding"),
        (on_gpu(dim=64), "flash-fa4", "triton-adding"),
        (on_gpu(dim=16), "triton", "triton"),
        (on_gpu("sliding window"), "triton", "triton-adding"),
        (on_gpu("sliding window", "softcap", "sinks", "deterministic backward"), "triton", "triton"),
        (on_gpu("softcap", "sinks", dim=256), "flash-fa4", "flash-fa4"),
        (on_gpu(dim=192, v_dim=128), "flash-fa4", "flash-fa4"),
        (on_gpu(dim=256), "triton", "triton"),
        (on_gpu(dim=512), "triton", "triton"),
        (on_gpu(dtype=torch.float32), "triton", "triton"),
        (on_gpu(dtype=torch.float64), "reference", "reference"),
        (on_gpu(dim=640), "reference", "reference"),
    ],
)
def test_what_auto_takes_on_a_hopper_gpu(machine: Machine, request_: AttentionRequest, forward: str, backward: str):
    """Megatron-LM#7417: no back end at all for packed input with large heads."""
    machine("sm90", *GPU_IMPLS)
    choice = resolve_impl(request_)
    assert (choice.forward, choice.backward) == (forward, backward)


def test_auto_needs_no_package_on_a_hopper_gpu(machine: Machine):
    machine("sm90", "triton", "triton-adding", "flash-fa2", "reference")
    assert resolve_impl(on_gpu()).kernels == "forward triton, backward triton-adding"


def test_auto_pairs_kernels_where_a_fixed_order_is_asked_for(machine: Machine):
    machine("sm90", *GPU_IMPLS)
    assert resolve_impl(on_gpu("deterministic backward")).kernels == "forward flash-fa4, backward triton"
    machine("sm90", "flash-fa4", "reference")
    choice = resolve_impl(on_gpu("deterministic backward"))
    assert choice.kernels == "forward flash-fa4, backward flash-fa4"
    assert "triton cannot run here" in choice.reason


@pytest.mark.parametrize(
    ("installed", "taken"),
    [
        (("triton", "flash-fa2", "reference"), "triton"),
        (("flash-fa2", "flex-triton", "reference"), "flash-fa2"),
        (("flex-triton", "reference"), "flex-triton"),
        (("reference",), "reference"),
    ],
)
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ("cpu", "any")])
def test_auto_takes_what_is_installed_and_says_what_it_went_without(
    machine: Machine, architecture: str, installed: tuple[str, ...], taken: str
):
    machine(architecture, *installed)
    choice = resolve_impl(on_gpu())
    assert choice.forward == taken
    assert ("triton cannot run here: no triton in this test" in choice.reason) == (taken != "triton")


@pytest.mark.parametrize("impl", IMPL_NAMES)
@pytest.mark.parametrize(
    ("architecture", "installed"),
    [
        ("cpu", ("flash-cpu", "reference")),
        ("sm80", ("triton", "flash-fa2", "flex-triton", "reference")),
        ("sm90", GPU_IMPLS),
        ("amd", ("triton", "reference")),
        ("other", ("reference",)),
    ],
)
def test_every_call_is_served_in_full_or_refused(
    machine: Machine, impl: str, architecture: str, installed: tuple[str, ...]
):
    machine(architecture, *installed)
    num_served = num_refused = 0
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
    head_dims = ((8, 8), (128, 128), (192, 128), (64, 512), (640, 640))
    for num_features in range(len(FEATURES) + 1):
        for features, dtype, (dim, v_dim) in itertools.product(
            itertools.combinations(FEATURES, num_features), dtypes, head_dims
        ):
            device_type = "cpu" if architecture == "cpu" else "cuda"
            request = request_of(*features, device_type=device_type, dtype=dtype, head_dim=dim, v_head_dim=v_dim)
            choice, refusal = None, ""
            try:
                choice = resolve_impl(request, impl)
            except ValueError as error:
                refusal = str(error)
            if choice is None:
                num_refused += 1
                assert f"impl={impl!r} cannot run this attention: " in refusal
                assert impl != "auto" or "Implementations that can: none" in refusal
                continue
            num_served += 1
            forward, backward = spec_named(choice.forward), spec_named(choice.backward)
            assert impl in ("auto", forward.impl, forward.name) and impl in ("auto", backward.impl, backward.name)
            assert {choice.forward, choice.backward} <= set(installed)
            assert request.features & OF_FORWARD <= forward.forward.features
            assert request.features & OF_BACKWARD <= backward.backward.features
            for kernel in (forward.forward, backward.backward):
                assert kernel.min_head_dim <= max(dim, v_dim) <= (kernel.max_head_dim or 10**6)
                assert dim == v_dim or not kernel.is_for_one_head_dim
            assert all(dtype in spec.dtypes for spec in (forward, backward))
    assert num_refused
    assert num_served or not {spec.name for spec in SPECS if impl in (spec.impl, spec.name)} & set(installed)


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (request_of("softcap"), "flash-cpu has no softcap"),
        (request_of("sliding window"), "flash-cpu has no sliding window"),
        (request_of(device_type="mps"), "device mps"),
        (request_of(dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (on_gpu(dtype=torch.float32), "dtype torch.float32"),
        (on_gpu(dim=512), "head dim 512 (at most 256)"),
        (on_gpu("deterministic backward"), "deterministic backward"),
    ],
)
def test_flash_asked_for_by_name_is_refused_by_name(machine: Machine, request_: AttentionRequest, feature: str):
    """And `auto` takes what can. Megatron-LM#7417: no back end at all for packed input with large heads."""
    machine("other", "flash-cpu", "flash-fa2", "reference")
    with pytest.raises(ValueError, match="impl='flash' cannot run this attention") as caught:
        resolve_impl(request_, "flash")
    assert feature in str(caught.value)
    if request_.dtype != torch.float8_e4m3fn:
        assert "can: reference;" in str(caught.value)
        assert resolve_impl(request_).impl == "reference"
    else:
        assert "can: none" in str(caught.value)


def test_a_provider_asked_for_by_name_is_obeyed_or_refused(machine: Machine):
    machine("sm90", "flash-fa2", "flash-fa4", "flex-triton", "reference")
    assert resolve_impl(on_gpu(), "flash").forward == "flash-fa4"
    assert resolve_impl(on_gpu(), "flash-fa2").kernels == "forward flash-fa2, backward flash-fa2"
    assert resolve_impl(on_gpu(), "flex").forward == "flex-triton"
    with pytest.raises(ValueError, match="flash-fa3 cannot run here: no flash-fa3 in this test"):
        resolve_impl(on_gpu(), "flash-fa3")
    with pytest.raises(
        ValueError, match=r"flex-fa4 has no sinks\. Implementations that can: flash-fa4, flash-fa2, flex"
    ):
        resolve_impl(on_gpu("sinks"), "flex-fa4")


def test_unknown_impl_lists_the_known():
    with pytest.raises(ValueError, match=r"'auto', 'flash', 'triton', .*'flash-fa4', .*, got 'sdpa'"):
        resolve_impl(request_of(), "sdpa")


def test_available_impls_say_why_not():
    """verl#5474: which one can be used where?"""
    statuses = {status.name: status for status in available_impls()}
    assert set(statuses) == {spec.name for spec in SPECS}
    assert statuses["reference"].is_available and statuses["flash-cpu"].is_available
    for name in ("flash-fa2", "triton", "flex-triton"):
        assert torch.cuda.is_available() or not statuses[name].is_available
    assert all(status.reason for status in statuses.values())


def test_the_op_refuses_what_its_plan_asks_for():
    case = make_case(LAYOUT)
    plan = AttentionPlan.build(LAYOUT, window=2)
    with pytest.raises(ValueError, match=r"flash-cpu has no sliding window"):
        forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, impl="flash")


@pytest.mark.parametrize("impl", IMPL_NAMES)
def test_the_op_serves_or_refuses_whatever_its_signature_can_say(impl: str):
    """Never an assertion, nor another kernel's error."""
    for dtype, window, softcap, has_sinks, deterministic, v_dim in itertools.product(
        (torch.bfloat16, torch.float64), (None, 2), (None, 3.0), (False, True), (False, True), (8, 4)
    ):
        case = make_case(LAYOUT, v_head_dim=v_dim, has_sinks=has_sinks).to(dtype)
        plan = AttentionPlan.build(LAYOUT, window=window)
        inputs = [x.requires_grad_() for x in (case.q_THD, case.k_THD, case.v_THE)]
        options = {"softcap": softcap, "sinks_H": case.sinks_H, "deterministic": deterministic, "impl": impl}
        refusal, out_THE = "", None
        try:
            out_THE = forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, **options)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            refusal = str(error)
        if out_THE is not None:
            gradients = torch.autograd.grad(out_THE, inputs, case.dout_THE)
            assert out_THE.shape[2] == v_dim and all(x.isfinite().all() for x in (out_THE, *gradients))
        else:
            assert impl != "auto" and f"impl={impl!r} cannot run this attention" in refusal


def test_the_shipped_table_is_sound():
    """Known names, pairs that fit, no row that nothing reaches."""
    rows = [row for rows in shipped_rows().values() for row in rows]
    for row in rows:
        check_row(row)
    assert impls.choice_table() == shipped_rows()


ROW = """
[[sm90]]
forward = "triton"
backward = "triton"
measured = "here"
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[sm91]]\nforward = 'triton'", "tables for sm91, allowed are cpu, sm80"),
        (ROW + "speed = 3", "row 1 for sm90: speed = 3 is no condition; allowed are head_dim"),
        (ROW + "window = 1", "row 1 for sm90: window = 1 is no condition"),
        (ROW + "head_dim = 128", "head_dim = 128 is no condition"),
        (ROW + "head_dim = [128, 64]", "is no condition"),
        (ROW + "rows_below = true", "is no condition"),
        (ROW + ROW.replace('"here"', '""'), "row 2 for sm90: measured must be a text, got ''"),
        (ROW.replace('backward = "triton"', ""), "row 1 for sm90: backward must be a text, got None"),
    ],
)
def test_a_table_that_says_nonsense_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_choices(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ROW.replace('backward = "triton"', 'backward = "tritn"'),
            "there is no implementation 'tritn'; there are flash",
        ),
        (ROW.replace('backward = "triton"', 'backward = "flex-triton"'), "triton and flex-triton cannot be paired"),
        (
            ROW.replace('forward = "triton"', 'forward = "flash-fa2"') + "window = true",
            "flash-fa2 has no sliding window",
        ),
        (
            ROW.replace('backward = "triton"', 'backward = "flash-fa2"') + "deterministic = true",
            "no deterministic backward",
        ),
        (ROW + "head_dim = [513, 600]", "triton has no head dim 513"),
        (ROW.replace("sm90", "cpu"), "triton has no device cpu"),
        (ROW.replace('forward = "triton"', 'forward = "flash-cpu"'), "flash-cpu has no device cuda"),
    ],
)
def test_a_row_that_no_call_could_take_is_refused(text: str, message: str):
    ((row,),) = parse_choices(text).values()
    with pytest.raises(ValueError, match=re.escape(message)):
        check_row(row)


PAIRS = """
[[sm90]]
forward = "flash-fa4"
backward = "triton"
measured = "row A"
head_dim = [65, 128]
sinks = true

[[sm90]]
forward = "flex-triton"
backward = "flex-triton"
measured = "row B"
rows_below = 512
deterministic = false

[[any]]
forward = "flash-fa4"
backward = "flash-fa4"
measured = "row C"
"""


def test_forward_and_backward_may_be_of_different_implementations(machine: Machine, table: Callable[[str], None]):
    machine("sm90", *GPU_IMPLS)
    table(PAIRS)
    choice = resolve_impl(on_gpu("sinks", "deterministic backward"))
    assert choice.kernels == "forward flash-fa4, backward triton"
    assert choice.reason == "choices.toml, row 1 for sm90: row A"
    assert resolve_impl(on_gpu("sinks", dim=64)).kernels == "forward flash-fa4, backward flash-fa4"
    assert resolve_impl(on_gpu()).reason == "choices.toml, row 1 for any: row C"
    # What neither can do passes the row over, and is told.
    choice = resolve_impl(on_gpu("sinks", "sliding window"))
    assert choice.forward == "triton" and "flash-fa4 has no sliding window" in choice.reason
    machine("sm90", "flash-fa4", "flash-fa2", "reference")
    choice = resolve_impl(on_gpu("sinks"))
    assert choice.kernels == "forward flash-fa4, backward flash-fa4"
    assert choice.reason.endswith("triton cannot run here: no triton in this test")


def test_rows_may_depend_on_the_size_of_the_layout(machine: Machine, table: Callable[[str], None]):
    machine("sm90", *GPU_IMPLS)
    table(PAIRS)
    of_rows = {rows: resolve_impl(on_gpu(num_rows=rows)).forward for rows in (0, 511, 512, None)}
    assert of_rows == {0: "flex-triton", 511: "flex-triton", 512: "flash-fa4", None: "flash-fa4"}
    line = explain_choice(on_gpu(), "auto", "head dim 128, global")
    assert line.startswith(
        "forward flash-fa4, backward flash-fa4 (head dim 128, global): choices.toml, row 1 for any: "
    )
    assert line.endswith("; forward flex-triton, backward flex-triton in layouts of fewer than 512 rows")
    assert "in layouts" not in explain_choice(on_gpu("deterministic backward", "softcap"), "auto", "")


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm80"),
        ((8, 6), "sm89"),
        ((8, 9), "sm89"),
        ((9, 0), "sm90"),
        ((10, 3), "sm100"),
        ((12, 0), "sm120"),
        ((7, 5), "other"),
    ],
)
def test_architectures(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert architecture_of("cuda") == architecture
    assert architecture_of("cpu") == "cpu" and architecture_of("mps") == "other"
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert architecture_of("cuda") == "amd"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_THD": torch.zeros(1, 6, 4, 8)}, "must be .rows, heads, head dim."),
        ({"k_THD": torch.zeros(5, 2, 8)}, "k_THD has 5 rows, but its plan was built for a layout of 6"),
        ({"v_THD": torch.zeros(6, 2, 8, dtype=torch.float64)}, "one floating dtype, got .*v_THD in torch.float64"),
        ({"k_THD": torch.zeros(6, 2, 7)}, "k must have q's head dim"),
        ({"v_THD": torch.zeros(6, 4, 8)}, "v as many heads as k"),
        ({"k_THD": torch.zeros(6, 3, 8), "v_THD": torch.zeros(6, 3, 8)}, "must divide the number of query heads"),
        ({"k_THD": torch.zeros(6, 0, 8), "v_THD": torch.zeros(6, 0, 8)}, "no dim may be empty"),
        ({"sinks_H": torch.zeros(3)}, "sinks_H must hold one floating number for each of 4 query heads"),
        ({"sinks_H": torch.zeros(4, dtype=torch.int64)}, "of torch.int64"),
        ({"q_THD": torch.zeros(6, 4, 8, device="meta")}, "q_THD is on meta, but its plan was built for cpu"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be a positive, finite number, got nan"),
        ({"softmax_scale": "0.3"}, "softmax_scale must be a positive, finite number, got '0.3'"),
        ({"softmax_scale": True}, "softmax_scale must be a positive, finite number, got True"),
        ({"softmax_scale": [0.3]}, "softmax_scale must be a positive, finite number"),
        ({"softmax_scale": 1e-44}, "softmax_scale must be a positive, finite number, got 1e-44"),
        ({"softcap": 1j}, "softcap must be a positive, finite number"),
        ({"impl": ["flash"]}, "impl must be one of .*, got .'flash'."),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive, finite number, got 0.0; pass None"),
        ({"softmax_scale": -0.5, "impl": "flash"}, "softmax_scale must be a positive, finite number, got -0.5"),
        ({"q_THD": np.zeros((6, 4, 8))}, "q_THD must be a torch.Tensor, got ndarray"),
        ({"sinks_H": [0.0] * 4}, "sinks_H must be a torch.Tensor, got list"),
        ({"plan": None}, r"plan must be an AttentionPlan, got NoneType; .*AttentionPlan.build\(layout\)"),
        ({"plan": LAYOUT}, "plan must be an AttentionPlan, got PackedLayout"),
        ({"softcap": 0.0}, "softcap must be a positive, finite number, got 0.0"),
        ({"impl": "flash", "softcap": 3.0}, "flash-cpu has no softcap"),
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


@pytest.mark.parametrize("value", [torch.tensor(0.3), np.float32(0.3), 0.3])
def test_numbers_of_any_library_are_numbers(value: object):
    q_THD = torch.randn(LAYOUT.num_rows, 2, 8)
    plan = AttentionPlan.build(LAYOUT)
    arguments: dict[str, Any] = {"softmax_scale": value, "softcap": value}
    out_THD = forest_attention(q_THD, q_THD, q_THD, plan, **arguments)
    exact_THD = forest_attention(q_THD, q_THD, q_THD, plan, softmax_scale=0.3, softcap=0.3)
    assert torch.allclose(out_THD, exact_THD, rtol=1e-6)


@pytest.mark.parametrize("device", ["nonsense", 5, None, "cuda:99"])
def test_a_device_that_is_not_here_is_named(device: Any):
    with pytest.raises(ValueError, match=r"device must name a device of this machine, got "):
        AttentionPlan.build(LAYOUT, device=device)


def test_a_numbered_cpu_is_the_cpu():
    q_THD = torch.randn(LAYOUT.num_rows, 2, 8)
    assert forest_attention(q_THD, q_THD, q_THD, AttentionPlan.build(LAYOUT, "cpu:0")).shape == q_THD.shape


@pytest.mark.parametrize("switch", ["1", "true", "ON", "yes", "y"])
def test_the_interpreters_switch_is_read_as_triton_reads_it(monkeypatch: pytest.MonkeyPatch, switch: str):
    monkeypatch.setenv("TRITON_INTERPRET", switch)
    assert specs.device_types_of(spec_named("triton")) == {"cpu"}
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert specs.device_types_of(spec_named("triton")) == {"cuda"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[sm90]\nforward = 'triton'\nbackward = 'triton'\nmeasured = 'x'",
            r"sm90 must be a list of rows, each under \[\[sm90",
        ),
        ("sm90 = ['a']", "sm90 must be a list of rows"),
        ("sm90 = 3", "sm90 must be a list of rows"),
        ("[[sm90", "choices.toml is no TOML"),
        (
            "[[sm90]]\nforward = 'triton'\nbackward = 'triton'\nmeasured = 'x'\nhead_dim = [true, 5]",
            "head_dim = .* must be two numbers",
        ),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_choices(text)


@pytest.mark.parametrize(
    ("architecture", "name", "head_dim", "message"),
    [
        ("sm90", "triton-adding", "[1, 32]", "triton-adding has no head dim 32"),
        ("sm80", "triton-adding", "[64, 128]", "triton-adding has no kernels for sm80"),
        ("sm80", "flash-fa4", "[64, 128]", "flash-fa4 has no kernels for sm80"),
    ],
)
def test_a_row_for_another_architecture_is_refused(architecture: str, name: str, head_dim: str, message: str):
    text = f"[[{architecture}]]\nforward = '{name}'\nbackward = '{name}'\nmeasured = 'x'\nhead_dim = {head_dim}"
    with pytest.raises(ValueError, match=message):
        check_row(parse_choices(text)[architecture][0])


def test_a_recipe_may_name_every_implementation():
    assert set(get_args(AttentionImpl)) == set(IMPL_NAMES)
