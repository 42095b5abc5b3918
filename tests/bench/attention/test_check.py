"""The check has the right answer, lets good kernels pass, and stops wrong ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.attention.oracle import assert_close, forests, make_groups, make_tree
from tests.bench.attention.inputs import all_windows, dense_answer, padded_stand_in, varlen_stand_in, work_of
from torch import Tensor

from ratoon.attention import AttentionPlan
from ratoon.bench.attention import check as checking
from ratoon.bench.attention.candidates import Candidate, make_ours
from ratoon.bench.attention.check import check, expect
from ratoon.bench.attention.peers import copied_keys, replicated_padded, replicated_varlen
from ratoon.bench.outcome import WrongResultError
from ratoon.layout import PackedLayout

GROUPS = make_groups((37, [19, 30, 1]), (5, [64, 40]))


@settings(deadline=None, max_examples=40)
@given(forests, st.data())
def test_the_exact_answer_is_exact(layout: PackedLayout, data: st.DataObject):
    assume(layout.num_rows)
    work = work_of(layout, window=data.draw(st.sampled_from(all_windows(layout))))
    max_scores = data.draw(st.sampled_from([1, 40, 2**20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_BLOCK_SCORES", max_scores)
        exact = checking._attend(work, [0, 1], torch.float64, rounds_to=torch.float64)
    assert_close([x.flatten(1, 2) for x in exact], dense_answer(work), 1e-12)


@pytest.mark.parametrize("kv_heads", [[0], [2], [0, 2]])
def test_some_heads_are_those_heads_of_the_whole(kv_heads: list[int]):
    work = work_of(make_tree([5, 4, 3], [-1, 0, 0]), heads=(6, 3))
    part = checking._attend(work, kv_heads, torch.float64, rounds_to=torch.float64)
    whole = [x.unflatten(1, (3, -1))[:, kv_heads] for x in dense_answer(work)]
    assert_close(part, whole, 1e-12)


@pytest.mark.parametrize(
    ("num_kv_heads", "heads_in_budget", "kv_heads"),
    [(8, 8.0, [0, 1, 2, 3, 4, 5, 6, 7]), (8, 1.0, [0, 7]), (8, 4.5, [0, 2, 5, 7]), (1, 0.1, [0])],
)
def test_heads_are_spread_within_the_budget(
    num_kv_heads: int, heads_in_budget: float, kv_heads: list[int], monkeypatch: pytest.MonkeyPatch
):
    work = work_of(GROUPS, heads=(8, num_kv_heads))
    flops = work.case.forward_flops + work.case.backward_flops
    monkeypatch.setattr(checking, "_CHECK_FLOPS", heads_in_budget * flops / num_kv_heads)
    assert checking._checked_heads(work) == kv_heads


MAKERS: dict[str, Callable] = {
    "flash-cpu": lambda work: make_ours("flash-cpu", work, AttentionPlan.build(work.case.layout)),
    "reference": lambda work: make_ours("reference", work, AttentionPlan.build(work.case.layout)),
    "padded": lambda work: replicated_padded("x", work, padded_stand_in),
    "varlen": lambda work: replicated_varlen("x", work, varlen_stand_in),
    "copied": lambda work: copied_keys("x", work, varlen_stand_in),
}
FORESTS = {
    "groups": GROUPS,
    "many responses": make_groups((64, [16] * 40)),
    "deep": make_tree([40, 30, 20, 30, 25, 10, 10], [-1, 0, 0, 1, 1, 3, 3]),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sound_kernels_pass(name: str, forest: str, dtype: torch.dtype):
    """Merged levels, copies and padding round more often than one pass does, and still are within the budget."""
    work = work_of(FORESTS[forest], dtype=dtype, D=64)
    expected = expect(work)
    errors = check(MAKERS[name](work), work, expected)
    assert 0 < errors.rms_error < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert 0 < expected.eager.rms_error < (1e-2 if dtype == torch.bfloat16 else 1e-6)


def ours(work_dtype: torch.dtype) -> tuple[Candidate, checking.Work]:
    work = work_of(GROUPS, dtype=work_dtype, D=32)
    return make_ours("flash-cpu", work, AttentionPlan.build(GROUPS)), work


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_a_tensor_that_is_a_little_wrong_is_named(tensor: str, dtype: torch.dtype):
    """All of it off by three percent, and one head of one row off by a third of the largest entry."""
    candidate, work = ours(dtype)
    expected = expect(work)
    place = ["out", "dq", "dk", "dv"].index(tensor)

    def everywhere(x_THD: Tensor) -> Tensor:
        return x_THD * 1.03

    def in_one_row(x_THD: Tensor) -> Tensor:
        x_THD = x_THD.clone()
        x_THD[11, 1] += x_THD.abs().max() / 3
        return x_THD

    for spoil in (everywhere, in_one_row):
        with pytest.raises(WrongResultError, match=rf"^{tensor}: largest error \S+ \(allowed \S+\), RMS [^;]*$"):
            check(_spoilt(candidate, place, spoil), work, expected)
    check(candidate, work, expected)


def test_what_is_not_finite_is_found_in_heads_that_are_not_checked():
    candidate, work = ours(torch.float32)
    expected = expect(work)
    expected = replace(expected, kv_heads=[0], exact=[x[:, :1] for x in expected.exact])

    def spoil(x_THD: Tensor) -> Tensor:
        x_THD = x_THD.clone()
        x_THD[0, -1, 0] = torch.nan
        return x_THD

    check(candidate, work, expected)
    with pytest.raises(WrongResultError, match="dv is not finite everywhere"):
        check(_spoilt(candidate, 3, spoil), work, expected)


def _spoilt(candidate: Candidate, place: int, spoil: Callable[[Tensor], Tensor]) -> Candidate:
    """One of out, dq, dk, dv is changed on its way to the check."""
    if place == 0:
        return replace(candidate, to_rows=lambda out: spoil(candidate.to_rows(out)))
    seen = iter(range(1, 4))  # gradients are mapped in the order dq, dk, dv
    return replace(
        candidate,
        sum_to_rows=lambda grad: (
            spoil(candidate.sum_to_rows(grad)) if next(seen) == place else candidate.sum_to_rows(grad)
        ),
    )
