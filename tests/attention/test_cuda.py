"""Every implementation that this GPU has, against float64. What is not installed here is skipped by name."""

# Shape letters: T rows, H heads, D head dim, E value head dim.

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import pytest
import torch
from tests.attention.oracle import (
    Case,
    assert_close,
    assert_within_error_budget,
    dense_attention,
    dense_mask,
    make_case,
    make_chain,
    make_groups,
    output_and_gradients,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ratoon.attention import AttentionPlan, AttentionRequest, available_impls, forest_attention, resolve_impl
from ratoon.attention.autograd import KernelPair, attend
from ratoon.attention.choice_table import architecture_of
from ratoon.attention.kernel import Scoring
from ratoon.attention.request import Feature
from ratoon.attention.specs import SPECS, ImplSpec, spec_named
from ratoon.layout import PackedLayout, pack_documents

pytestmark = pytest.mark.gpu

FORESTS = {
    "one group": make_groups((300, [64] * 8)),
    "ragged groups": make_groups((129, [7, 1, 300, 0]), (1, [1]), (64, [33, 128])),
    "empty and single": make_groups((1, []), (5, [0]), (1, [1])),
    "deep chain": make_chain(6, 21),
    "documents": pack_documents([[1] * n for n in (1, 130, 17, 256)]),
}

GPU_SPECS = [spec for spec in SPECS if spec.device_types is None or "cuda" in spec.device_types]
GPU_IMPLS = [spec.name for spec in GPU_SPECS]
FAST_IMPLS = [name for name in GPU_IMPLS if name != "reference"]


@dataclass(frozen=True)
class Shape:
    """One call's kind. Kernels are compiled for each: every forest is run in one test."""

    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (8, 2)
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    deterministic: bool = False

    @property
    def request(self) -> AttentionRequest:
        asked: dict[Feature, bool] = {
            "sliding window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.has_sinks,
            "deterministic backward": self.deterministic,
        }
        return AttentionRequest(
            device_type="cuda",
            dtype=self.dtype,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            features=frozenset(feature for feature, is_asked in asked.items() if is_asked),
        )

    def case(self, layout: PackedLayout, seed: int = 0) -> Case:
        case = make_case(
            layout,
            heads=self.heads,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            has_sinks=self.has_sinks,
            softcap=self.softcap,
            seed=seed,
        )
        return case.to(self.dtype, "cuda")


SHAPES = {
    "d 64, one key head": Shape(dims=(64, 64), heads=(8, 1)),
    "d 128": Shape(),
    "d 128, fp16, no sharing of key heads, sinks": Shape(heads=(4, 4), dtype=torch.float16, has_sinks=True),
    "MLA": Shape(dims=(192, 128), heads=(4, 4)),
    "MLA, shared key heads": Shape(dims=(192, 128), heads=(4, 2), has_sinks=True),
    "odd dims": Shape(dims=(36, 20), heads=(9, 3), has_sinks=True),
    "d 80, seven query heads to a key head": Shape(dims=(80, 80), heads=(14, 2)),
    "d 256": Shape(dims=(256, 256), heads=(4, 2)),
    "d 512": Shape(dims=(512, 512), heads=(4, 2)),
    "window": Shape(window=5),
    "window, d 256, softcap, sinks": Shape(dims=(256, 256), heads=(4, 2), window=17, softcap=3.0, has_sinks=True),
    "softcap": Shape(softcap=2.0),
    "deterministic": Shape(deterministic=True, has_sinks=True),
    "fp32": Shape(dims=(64, 64), dtype=torch.float32, has_sinks=True),
}


def serves(spec: ImplSpec, shape: Shape) -> bool:
    return not spec.lacks(shape.request, in_forward=True, in_backward=True)


SERVED = [(spec.name, name) for spec in GPU_SPECS for name, shape in SHAPES.items() if serves(spec, shape)]


def need(*impls: str) -> None:
    for status in available_impls():
        if status.name in impls and not status.is_available:
            pytest.skip(f"{status.name}: {status.reason}")


def attention_of(
    layout: PackedLayout, impl: str, *, window: int | None = None, deterministic: bool = False
) -> Callable[[Case], Tensor]:
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
            deterministic=deterministic,
            impl=impl,
        )

    return attention


@pytest.mark.parametrize(("impl", "name"), SERVED)
def test_every_shape_stays_in_the_error_budget(impl: str, name: str):
    need(impl)
    shape = SHAPES[name]
    for layout in FORESTS.values():
        attention = attention_of(layout, impl, window=shape.window, deterministic=shape.deterministic)
        mask_TT, case = dense_mask(layout, shape.window).cuda(), shape.case(layout)
        if shape.dtype != torch.float32:
            assert_within_error_budget(attention, case, mask_TT)
            continue
        # Eager attention sums so well in fp32 that twice its error is less than one rounding of what a kernel keeps.
        case64 = case.to(torch.float64, "cuda")
        exact = output_and_gradients(lambda case, mask_TT=mask_TT: dense_attention(case, mask_TT), case64)
        assert_close([x.double() for x in output_and_gradients(attention, case)], exact, 5e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_auto_serves_every_shape(name: str):
    shape, layout = SHAPES[name], FORESTS["ragged groups"]
    attention = attention_of(layout, "auto", window=shape.window, deterministic=shape.deterministic)
    mask_TT, case64 = dense_mask(layout, shape.window).cuda(), shape.case(layout).to(torch.float64, "cuda")
    exact = output_and_gradients(lambda case: dense_attention(case, mask_TT), case64)
    got = output_and_gradients(attention, shape.case(layout))
    assert_close([x.double() for x in got], exact, 5e-6 if shape.dtype == torch.float32 else 0.03)


PAIRED = [spec.name for spec in GPU_SPECS if not spec.has_own_autograd]


@pytest.mark.parametrize("backward", PAIRED)
@pytest.mark.parametrize("forward", PAIRED)
def test_any_forward_goes_with_any_backward(forward: str, backward: str):
    """What passes between them is the output and the log-sum-exp, sinks included."""
    need(forward, backward)
    kernels = KernelPair(
        import_module(spec_named(forward).home).forward, import_module(spec_named(backward).home).backward
    )
    shape = Shape(has_sinks=True)
    for layout in (FORESTS["ragged groups"], FORESTS["deep chain"]):
        plan, scoring = AttentionPlan.build(layout, "cuda"), Scoring(softmax_scale=1 / math.sqrt(shape.dims[0]))

        def attention(case: Case, plan: AttentionPlan = plan, scoring: Scoring = scoring) -> Tensor:
            tensors = (case.q_THD, case.k_THD, case.v_THE, case.sinks_H)
            return attend(*tensors, plan, scoring, kernels, deterministic=False)

        assert_within_error_budget(attention, shape.case(layout), dense_mask(layout).cuda())


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (17, 3.0)])
def test_reference_is_exact_in_float64(name: str, window: int | None, softcap: float | None):
    layout = FORESTS[name]
    mask_TT = dense_mask(layout, window).cuda()
    case = make_case(layout, has_sinks=True, softcap=softcap).to(torch.float64, "cuda")
    exact = output_and_gradients(lambda case: dense_attention(case, mask_TT), case)
    ours = output_and_gradients(attention_of(layout, "reference", window=window), case)
    for x, z in zip(ours, exact, strict=True):
        assert (x - z).abs().max() <= 1e-10 * max(z.abs().max().item(), 1.0)


def random_forests() -> list[PackedLayout]:
    """50, of 100 to 3000 rows: ragged groups, deep chains, documents."""
    generator = torch.Generator().manual_seed(4)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def group() -> tuple[int, list[int]]:
        return draw(1, 400), [draw(0, 120) for _ in range(draw(1, 6))]

    forests: list[PackedLayout] = []
    for number in range(50):
        match number % 5:
            case 3:
                forests.append(make_chain(draw(2, 6), draw(20, 100)))
            case 4:
                forests.append(pack_documents([[1] * draw(1, 500) for _ in range(draw(1, 5))]))
            case _:
                forests.append(make_groups(*(group() for _ in range(draw(1, 3)))))
    return forests


def replicated_fa2(layout: PackedLayout, case: Case) -> list[Tensor]:
    """out, dq, dk, dv of torch's FA2 over every sequence whole, its prompt copied for each.

    A shared row's output is its first copy's, and the loss counts it there; its gradients are summed over the
    copies in float64 and rounded once, as a matrix product behind them would do.
    """
    rows_of = [torch.from_numpy(layout.sequence_rows(sequence)) for sequence in range(layout.num_sequences)]
    rows = torch.cat(rows_of).cuda()
    lengths = torch.tensor([0] + [len(x) for x in rows_of])
    cu_seqlens, longest = lengths.cumsum(0).to("cuda", torch.int32), int(lengths.max())
    # For each row, its first copy.
    first_T = torch.full((layout.num_rows,), len(rows), device="cuda")
    first_T.scatter_reduce_(0, rows, torch.arange(len(rows), device="cuda"), "amin")
    q, k, v = (x[rows] for x in (case.q_THD, case.k_THD, case.v_THE))
    dout = torch.zeros(len(rows), *case.dout_THE.shape[1:], dtype=case.dout_THE.dtype, device="cuda")
    dout[first_T] = case.dout_THE
    runs = (cu_seqlens, cu_seqlens, longest, longest, 0.0, True)
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *runs, False)
    copies = torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, *runs, rng_state, unused)
    inputs = (case.q_THD, case.k_THD, case.v_THE)
    summed = [
        torch.zeros_like(x, dtype=torch.float64).index_add_(0, rows, copy.double()).to(x.dtype)
        for x, copy in zip(inputs, copies, strict=True)
    ]
    return [out[first_T], *summed]


@cache
def errors_of_fa2() -> tuple[list[tuple[PackedLayout, Case, list[Tensor]]], "Errors"]:
    """The forests with their inputs and exact results, and what replicated FA2 makes of them."""
    studied: list[tuple[PackedLayout, Case, list[Tensor]]] = []
    errors = Errors()
    for seed, layout in enumerate(random_forests()):
        case, mask_TT = Shape().case(layout, seed), dense_mask(layout).cuda()
        case64 = case.to(torch.float64, "cuda")
        exact = output_and_gradients(lambda case, mask_TT=mask_TT: dense_attention(case, mask_TT), case64)
        errors.add(replicated_fa2(layout, case), exact)
        studied.append((layout, case, exact))
    return studied, errors


class Errors:
    """Of out, dq, dk, dv, in each forest."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []
        self._squares: list[Tensor] = []

    def add(self, results: list[Tensor], exact: list[Tensor]) -> None:
        errors = [(x.double() - z).abs() for x, z in zip(results, exact, strict=True)]
        self._largest.append(torch.stack([error.max() for error in errors]))
        self._squares.append(torch.stack([error.square().sum() for error in errors]))

    def largest_over(self, others: "Errors") -> Tensor:
        """The ratio of the largest errors of all forests: of one element each."""
        return torch.stack(self._largest).amax(0) / torch.stack(others._largest).amax(0)

    def mean_largest_over(self, others: "Errors") -> tuple[Tensor, Tensor]:
        """The ratio of the means of the forests' largest errors, and its standard error."""
        return _ratio(torch.stack(self._largest), torch.stack(others._largest))

    def rms_over(self, others: "Errors") -> tuple[Tensor, Tensor]:
        """The ratio of RMS errors over the same forests, and its standard error."""
        ratio, standard_error = _ratio(torch.stack(self._squares), torch.stack(others._squares))
        return ratio.sqrt(), standard_error / (2 * ratio.sqrt())


def _ratio(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Of sums over forests, [forests, 4]; its standard error by leaving out one forest at a time (jackknife)."""
    without_one = (ours.sum(0) - ours) / (theirs.sum(0) - theirs)
    count = len(ours)
    standard_error = ((count - 1) / count * (without_one - without_one.mean(0)).square().sum(0)).sqrt()
    return ours.sum(0) / theirs.sum(0), standard_error


ALLOWED = {"flash-fa2": (1.5, 1.1), "flash-fa3": (1.5, 1.1), "flash-fa4": (1.1, 1.1), "flex-fa4": (1.0, 1.002)}
"""Parts of FA2's largest errors (mean of all forests) and RMS errors, 1 each for all others.

Levels are rounded to bf16 before they are merged: a rounding more. flash-fa4's backward pass has levels, and its
forward pass and flex-fa4's weigh tiles of 128 keys: of a tile's probabilities the largest so far is exact, and FA2's
tiles are smaller. On an H200: flash-fa2 1.08; flash-fa4 1.002 in out, 1.07 in dq; flex-fa4 1.0017 in out.
"""


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_errors_are_no_larger_than_those_of_replicated_fa2(impl: str):
    """Largest and RMS errors of 50 random forests, of the output and of each gradient.

    Two kernels that round alike differ by chance, so three standard errors are allowed. The largest of all forests is
    one element's, which one kernel rounds up and the other down: over five draws of inputs our kernels had 0.84 to 1.23
    of FA2's for dq, 0.88 to 1.03 for out, where the mean of the forests' largest was 1.005 and 0.990 of FA2's.
    """
    need(impl, "flash-fa2")
    studied, of_fa2 = errors_of_fa2()
    ours = Errors()
    for layout, case, exact in studied:
        ours.add(output_and_gradients(attention_of(layout, impl), case), exact)
    largest, (mean_largest, chance), (rms, rms_chance) = (
        ours.largest_over(of_fa2),
        ours.mean_largest_over(of_fa2),
        ours.rms_over(of_fa2),
    )
    report = (
        f"{impl}, parts of FA2's error in out, dq, dk, dv: largest {largest.tolist()}, mean of the forests' largest "
        f"{mean_largest.tolist()} (standard error {chance.tolist()}), RMS {rms.tolist()} ({rms_chance.tolist()})"
    )
    print(f"\n{report}")
    allowed_largest, allowed_rms = ALLOWED.get(impl, (1.0, 1.0))
    assert (mean_largest <= allowed_largest + 3 * chance).all(), report
    assert (rms <= allowed_rms + 3 * rms_chance).all(), report
    assert (largest <= 1.5 * allowed_largest).all(), report


@pytest.mark.parametrize("impl", ["auto", *(name for name, shape in SERVED if shape == "deterministic")])
def test_deterministic_gradients_are_bitwise_equal_in_ten_runs(impl: str):
    """Where dq is summed by atomics, many key tiles add to one row."""
    need(impl)
    layout = make_groups((2048, [256] * 16), (1024, [128] * 8))
    shape = SHAPES["deterministic"]
    case, attention = shape.case(layout), attention_of(layout, impl, deterministic=True)
    first, *others = (output_and_gradients(attention, case) for _ in range(10))
    assert all(torch.equal(x, y) for again in others for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_no_layer_waits_for_the_device(impl: str):
    """All lengths are known on the host, and a plan's tensors go over while the device works on the last one."""
    need(impl)
    layout = FORESTS["ragged groups"]
    case = Shape(has_sinks=serves(spec_named(impl), Shape(has_sinks=True))).case(layout)
    output_and_gradients(attention_of(layout, impl), case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output_and_gradients(attention_of(layout, impl), case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", GPU_IMPLS)
def test_changing_one_sequence_leaves_the_others_bitwise_equal(impl: str):
    """Changing sequence 1 moved sequence 2: NeMo-RL#4167, NeMo-RL#2105."""
    need(impl)
    layout = FORESTS["one group"]
    case = Shape().case(layout)
    attention = attention_of(layout, impl)
    changed = slice(int(layout.segment_offsets[2]), int(layout.segment_offsets[3]))
    with torch.no_grad():
        before = attention(case)
        for tensor in (case.q_THD, case.k_THD, case.v_THE):
            tensor[changed] = 3 * torch.randn_like(tensor[changed])
        after = attention(case)
    assert torch.equal(before[: changed.start], after[: changed.start])
    assert torch.equal(before[changed.stop :], after[changed.stop :])
    assert not torch.equal(before[changed], after[changed])


@pytest.mark.parametrize("impl", GPU_IMPLS)
def test_no_rows(impl: str):
    """Varlen kernels stop with "batch size must be positive": verl#1270."""
    need(impl)
    layout = pack_documents([])
    case = Shape(has_sinks=serves(spec_named(impl), Shape(has_sinks=True))).case(layout)
    got = output_and_gradients(attention_of(layout, impl), case)
    assert got[0].shape == (0, 8, 128) and all(x.eq(0).all() for x in got[1:])


@pytest.mark.parametrize("impl", GPU_IMPLS)
def test_checkpointing_and_autocast_change_nothing(impl: str):
    need(impl)
    layout = FORESTS["one group"]
    case, attention = Shape().case(layout), attention_of(layout, impl)

    def checkpointed(case: Case) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            out_THE = checkpoint(
                lambda q, k, v: attention(Case(q, k, v, None, case.dout_THE)),
                *(case.q_THD, case.k_THD, case.v_THE),
                use_reentrant=False,
            )
        assert isinstance(out_THE, Tensor)
        return out_THE

    plain, again = output_and_gradients(attention, case), output_and_gradients(checkpointed, case)
    for name, x, y in zip(("out", "dq", "dk", "dv"), plain, again, strict=True):
        # Sums by atomics differ in their last bits from run to run.
        is_fixed = name == "out" or impl in ("triton", "flex-triton", "reference")
        assert (x - y).abs().max() <= (0.0 if is_fixed else 1e-2) * x.abs().max(), name


def peak_bytes(layout: PackedLayout, shape: Shape, impl: str) -> int:
    """The most that forward and backward hold at a time beyond their inputs, once kernels and schedules are there."""
    case, attention = shape.case(layout), attention_of(layout, impl)
    output_and_gradients(attention, case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output_and_gradients(attention, case)
    return torch.cuda.max_memory_allocated() - before


PADDED_RUNS = {"flash-fa2": 128}
"""Rows that a kernel of others adds to each run in its fp32 sums of dq."""


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_memory_is_linear_in_rows_and_independent_of_the_number_of_responses(impl: str):
    """At 16384 rows, a copy of the prompt for each response would be 4 or 64 times the rows."""
    need(impl)
    shape = Shape(heads=(32, 8), has_sinks=serves(spec_named(impl), Shape(has_sinks=True)))
    P = 8192
    half = peak_bytes(make_groups((P // 2, [1024] * 4)), shape, impl)
    few = peak_bytes(make_groups((P, [2048] * 4)), shape, impl)
    many = peak_bytes(make_groups((P, [64] * 128)), shape, impl)
    assert 1.5 < few / half <= 2.2, "8192 and 16384 rows"
    padding = 128 * PADDED_RUNS.get(impl, 0) * shape.heads[0] * shape.dims[0] * 4
    assert many <= 1.1 * few + padding, "the same rows in 32 times as many responses"
    num_rows, (Hq, Hkv), (D, E) = 2 * P, shape.heads, shape.dims
    bytes_of_inputs = 2 * num_rows * (Hq * D + Hkv * D + Hkv * E)
    assert few <= 10 * bytes_of_inputs, "outputs, gradients, and fp32 sums of some"


@pytest.mark.parametrize("impl", ["triton", "flash-fa4"])
def test_addresses_past_32_bits(impl: str):
    """T * H * D is over 2**31, so that a row times its stride needs 64 bits. The last group is a copy of the first."""
    need(impl)
    layout = make_groups((64, [64]), *[(16_384, [])] * 8, (64, [64]))
    num_rows, num_heads, dim = layout.num_rows, 128, 128
    assert num_rows * num_heads * dim > 2**31
    shapes = [(num_rows, heads, dim) for heads in (num_heads, 1, 1, num_heads)]
    q_THD, k_THD, v_THD, dout_THD = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    for tensor in (q_THD, k_THD, v_THD, dout_THD):
        tensor[-128:] = tensor[:128]
    leaves = [tensor.requires_grad_() for tensor in (q_THD, k_THD, v_THD)]
    out_THD = forest_attention(q_THD, k_THD, v_THD, AttentionPlan.build(layout, "cuda"), impl=impl)
    for result in (out_THD, *torch.autograd.grad(out_THD, leaves, dout_THD)):
        first, last = result[:128].float(), result[-128:].float()
        assert (first - last).abs().max() <= 1e-2 * first.abs().max()


@pytest.mark.parametrize("impl", ["auto", *FAST_IMPLS])
def test_tensors_of_another_gpu_than_the_current_one(impl: str):
    """Triton launches on the current device: without care, another GPU's addresses would be read there."""
    need(impl)
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    layout, shape = FORESTS["ragged groups"], Shape()
    case = shape.case(layout).to(shape.dtype, "cuda:1")
    plan = AttentionPlan.build(layout, "cuda:1")

    def attention(case: Case) -> Tensor:
        return forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, impl=impl)

    assert torch.cuda.current_device() == 0
    assert_within_error_budget(attention, case, dense_mask(layout).to("cuda:1"))


def test_auto_takes_what_its_table_says():
    """On a Hopper GPU: FlashAttention-4 where it is installed, our own kernels for what it has not."""
    if architecture_of("cuda") != "sm90":
        pytest.skip("the expectations are those of sm90")
    has_fa4 = any(status.name == "flash-fa4" and status.is_available for status in available_impls())
    assert resolve_impl(Shape().request).forward == ("flash-fa4" if has_fa4 else "triton")
    assert resolve_impl(Shape(window=5).request).kernels == "forward triton, backward triton-adding"
    for shape in (Shape(dims=(512, 512)), Shape(dtype=torch.float32), Shape(window=5, deterministic=True)):
        assert resolve_impl(shape.request).kernels == "forward triton, backward triton"
