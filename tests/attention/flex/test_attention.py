"""FlexAttention over the forest, on the CPU: torch's dense stand-ins for its kernels, and the graphs it compiles.

Torch refuses gradients on a CPU in front of the operator, though the operator has them there; the tests go past it.
"""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.oracle import (
    Case,
    assert_close,
    dense_attention,
    dense_mask,
    forests,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from ratoon.attention import AttentionPlan
from ratoon.attention.flex import attention
from ratoon.attention.flex.attention import flex_attention
from ratoon.attention.flex.compiled import CompiledCall
from ratoon.attention.kernel import Scoring
from ratoon.layout import PackedLayout, pack_documents

LAYOUTS = (make_groups((300, [64] * 5)), make_groups((129, [7, 1, 200, 0]), (1, [1])), make_chain(6, 21))


def attend(layout: PackedLayout, window: int | None = None, backend: Any = "triton") -> Callable[[Case], Tensor]:
    plan = AttentionPlan.build(layout, window=window)

    def run(case: Case) -> Tensor:
        scale = case.q_THD.shape[2] ** -0.5 if case.softmax_scale is None else case.softmax_scale
        scoring = Scoring(softmax_scale=scale, softcap=case.softcap)
        return flex_attention(case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan, scoring, backend=backend)

    return run


def compile_with(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "compiled_call", cache(partial(CompiledCall, compiler=compiler)))


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as ever, but run by torch's dense implementation, forward and backward."""
    compile_with("aot_eager", monkeypatch)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_tensors: None)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


# The kinds of call that are drawn are few: each is traced once.
drawn_kinds = st.sampled_from(
    [
        (None, None, False, (4, 2)),
        (3, None, True, (3, 1)),
        (1, 2.0, False, (2, 2)),
        (None, 3.0, True, (4, 2)),
    ]
)
_eager_call = cache(partial(CompiledCall, compiler="eager"))


@settings(deadline=None, max_examples=40)
@given(forests, drawn_kinds, st.integers(0, 5))
def test_equals_the_oracle(layout: PackedLayout, kind: tuple[int | None, float | None, bool, Any], seed: int):
    window, softcap, has_sinks, heads = kind
    case = make_case(layout, heads=heads, has_sinks=has_sinks, softcap=softcap, v_head_dim=5, seed=seed)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(attention, "compiled_call", _eager_call)
        got = attend(layout, window)(case)
    assert_close([got], [dense_attention(case, dense_mask(layout, window))], 1e-6 if has_sinks else 1e-10)


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (5, 2.0, True), (17, None, True)])
def test_gradients_equal_the_oracle(window: int | None, softcap: float | None, has_sinks: bool):
    """With sinks to single precision, in which the operator keeps the log-sum-exp."""
    for layout in LAYOUTS:
        case = make_case(layout, has_sinks=has_sinks, softcap=softcap, v_head_dim=12, softmax_scale=0.7)
        wanted = output_and_gradients(partial(dense_attention, mask_TT=dense_mask(layout, window)), case)
        assert_close(output_and_gradients(attend(layout, window), case), wanted, 3e-6 if has_sinks else 1e-10)


@pytest.mark.usefixtures("dense")
def test_the_gradient_of_the_log_sum_exp_is_not_dropped():
    """Kernels that return a log-sum-exp often have no gradient for it: flash-attention#889.

    It is the sinks' own gradient, and through the weight that a sink leaves to the keys, that of q and k.
    """
    layout = LAYOUTS[1]
    case = make_case(layout, has_sinks=True)
    case.sinks_H.add_(3.0)  # pyright: ignore[reportOptionalMemberAccess]  # a sink that takes most of the weight
    wanted = output_and_gradients(lambda case: dense_attention(case, dense_mask(layout)), case)
    got = output_and_gradients(attend(layout), case)
    assert_close(got, wanted, 3e-6)
    without = output_and_gradients(attend(layout), make_case(layout))
    assert (got[1] - without[1]).abs().max() > 0.1 and got[4].abs().max() > 0.1


@pytest.mark.usefixtures("dense")
def test_no_rows():
    """A length of nothing would be compiled in as a constant, and kernels refuse it: verl#1270."""
    layout = pack_documents([])
    for has_sinks in (False, True):
        got = output_and_gradients(attend(layout), make_case(layout, has_sinks=has_sinks, v_head_dim=5))
        assert got[0].shape == (0, 4, 5) and all(not grad.any() for grad in got)


@pytest.mark.usefixtures("dense")
def test_backward_runs_twice_where_no_buffer_is_given_away():
    layout = LAYOUTS[2]
    case = make_case(layout)
    q_THD = case.q_THD.requires_grad_()
    with pytest.raises(RuntimeError, match="donated_buffer"):
        attend(layout)(case).backward(case.dout_THE, retain_graph=True)
    with functorch_config.patch(donated_buffer=False):
        torch.compiler.reset()
        out_THE = attend(layout)(case)
        first, second = (
            torch.autograd.grad(out_THE, q_THD, case.dout_THE, retain_graph=is_first)[0] for is_first in (True, False)
        )
    assert torch.equal(first, second)


def lengths_to(num_layouts: int) -> list[PackedLayout]:
    """Layouts of other row counts, segments and depths, smaller than a tile and larger."""
    groups = [make_groups((1 + 13 * n, [3 * n, 5, 40 + n])) for n in range(num_layouts - 2)]
    return [*groups, make_chain(3, 30), pack_documents([[1] * 200, [1] * 300])]


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_lengths_compile_nothing_anew(compiler: str, monkeypatch: pytest.MonkeyPatch):
    """Compiled for one shape, attention stalled for seconds at every other: unsloth#6871, Automodel#2532.

    Masks that close over a plan's tensors or numbers did so too: pytorch#141486.
    """
    compile_with(compiler, monkeypatch)
    with torch.no_grad():
        for window in (None, 2, 50):
            before = num_graphs()
            for layout in lengths_to(20):
                case = make_case(layout, softcap=2.0).to(torch.float32)
                got = attend(layout, window)(case)
                assert_close([got], [dense_attention(case, dense_mask(layout, window))], 2e-6)
            # A window of 50 is of one kind with a window of 2.
            assert num_graphs() - before == (0 if window == 50 else 1), f"window {window}"


@pytest.mark.usefixtures("dense")
def test_training_compiles_once_for_all_lengths():
    before = num_graphs()
    for layout in (*LAYOUTS, *lengths_to(4)):
        output_and_gradients(attend(layout, 9), make_case(layout, has_sinks=True))
    assert num_graphs() - before == 1


def test_no_kind_of_call_uses_up_the_graphs_of_another(monkeypatch: pytest.MonkeyPatch):
    """Dynamo compiles a few graphs of one code object, then runs it as it stands: with all T x T scores in memory."""
    compile_with("eager", monkeypatch)
    layout = make_groups((5, [3, 4]))
    before = num_graphs()
    with torch.no_grad(), dynamo_config.patch(recompile_limit=1):
        for head_dim in (16, 17, 18):
            case = make_case(layout, head_dim=head_dim)
            got = attend(layout)(case)
            assert_close([got], [dense_attention(case, dense_mask(layout))], 1e-10)
    assert num_graphs() - before == 3


def captured_by_mask(backend: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Kernel options, and what score and mask close over, in a graph that is traced for a second scale and softcap."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compile_with(keep, monkeypatch)
    with torch.no_grad():
        for scale in (0.25, 0.3):
            case = make_case(LAYOUTS[0], softcap=10 * scale, softmax_scale=scale)
            attend(LAYOUTS[0], 5 if scale == 0.25 else 7, backend)(case)
    (call,) = (node for node in graphs[-1].graph.nodes if node.name == "flex_attention")
    assert call.args[5] == 0.3
    *_, options, score_captures, mask_captures = call.args
    return options, list(score_captures), list(mask_captures)


@pytest.mark.parametrize(("backend", "name"), [("triton", "TRITON"), ("fa4", "FLASH")])
def test_masks_hold_no_number_that_changes(backend: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """The FlashAttention-4 back end refuses what dynamic compilation makes of captured numbers: flash-attention#2353.

    Only tensors are captured, and their lengths, which torch knows to come from tensors.
    """
    options, score_captures, mask_captures = captured_by_mask(backend, monkeypatch)
    assert options["BACKEND"] == name
    assert not score_captures
    values = [node.meta["example_value"] for node in mask_captures]
    assert sum(isinstance(value, Tensor) for value in values) == 3
    lengths = {str(value.shape[0]) for value in values if isinstance(value, Tensor)}
    assert {str(value) for value in values if not isinstance(value, Tensor)} <= lengths


@pytest.mark.usefixtures("dense")
def test_compiled_beneath_a_compiled_model():
    """Attention is hidden from the model's compiler, and must be compiled all the same, not run densely."""
    layout = LAYOUTS[0]
    case = make_case(layout)
    plan, scoring = AttentionPlan.build(layout), Scoring(softmax_scale=case.q_THD.shape[2] ** -0.5)

    def hidden(q_THD: Tensor) -> Tensor:
        return flex_attention(q_THD, case.k_THD, case.v_THE, None, plan, scoring, backend="triton")

    run: Any = torch.compiler.disable(hidden)
    model = torch.compile(lambda q_THD: 2 * run(3 * q_THD), backend="aot_eager")
    before = num_graphs()
    with torch.no_grad():
        got = model(case.q_THD)
    wanted = 2 * dense_attention(replace(case, q_THD=3 * case.q_THD), dense_mask(layout))
    assert_close([got], [wanted], 1e-10)
    assert num_graphs() - before == 3, "before attention, attention, after attention"


@pytest.mark.usefixtures("dense")
def test_rows_in_other_strides():
    """Queries, keys and values as they come out of one projection."""
    layout = LAYOUTS[2]
    case = make_case(layout, head_dim=16)
    fused_THD = torch.cat([case.q_THD, case.k_THD, case.v_THE], dim=1)
    q_THD, k_THD, v_THE = fused_THD.split([4, 2, 2], dim=1)
    sliced = Case(q_THD, k_THD, v_THE, None, case.dout_THE.transpose(0, 1).contiguous().transpose(0, 1))
    got = output_and_gradients(attend(layout), sliced)
    assert_close(got, output_and_gradients(lambda case: dense_attention(case, dense_mask(layout)), case), 1e-10)


@pytest.mark.usefixtures("dense")
def test_changing_one_sequence_leaves_the_others_bitwise_equal():
    """Changing sequence 1 moved sequence 2: NeMo-RL#4167, NeMo-RL#2105."""
    layout = LAYOUTS[0]
    case = make_case(layout)
    with torch.no_grad():
        before = attend(layout)(case)
        changed = slice(int(layout.segment_offsets[2]), int(layout.segment_offsets[3]))
        for tensor in (case.q_THD, case.k_THD, case.v_THE):
            tensor[changed] = 3 * torch.randn_like(tensor[changed])
        after = attend(layout)(case)
    assert torch.equal(before[: changed.start], after[: changed.start])
    assert torch.equal(before[changed.stop :], after[changed.stop :])
    assert not torch.equal(before[changed], after[changed])


def test_a_sink_under_fa4_is_our_mistake():
    """Its backward refuses the gradient of the log-sum-exp, which it also returned in other units: pytorch#181645.

    The registry does not list sinks for it.
    """
    with pytest.raises(AssertionError, match="sinks"):
        attend(LAYOUTS[0], backend="fa4")(make_case(LAYOUTS[0], has_sinks=True))
