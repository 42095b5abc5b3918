"""Peers do the same work: what they replicate, copy or mask comes back as the rows of the forest."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.attention.oracle import assert_close, dense_mask, forests, make_groups, make_tree
from tests.bench.attention.inputs import (
    all_windows,
    answer_of,
    dense_answer,
    padded_stand_in,
    varlen_stand_in,
    work_of,
)

from ratoon.bench.attention import peers
from ratoon.bench.attention.candidates import Work
from ratoon.bench.attention.peers import PEERS, copied_keys, make_peer, replicated_padded, replicated_varlen
from ratoon.bench.outcome import CannotRunError
from ratoon.layout import PackedLayout, pack_documents


def has_every_row_in_a_sequence(layout: PackedLayout) -> bool:
    rows = [layout.sequence_rows(index) for index in range(layout.num_sequences)]
    return layout.num_rows > 0 and np.unique(np.concatenate(rows)).size == layout.num_rows


@settings(deadline=None, max_examples=40)
@given(forests, st.data())
def test_varlen_peers_compute_the_forest(layout: PackedLayout, data: st.DataObject):
    assume(layout.num_sequences and has_every_row_in_a_sequence(layout))
    work = work_of(layout, window=data.draw(st.sampled_from(all_windows(layout))))
    wanted = dense_answer(work)
    assert_close(answer_of(replicated_varlen("x", work, varlen_stand_in)), wanted, 1e-12)
    assert_close(answer_of(copied_keys("x", work, varlen_stand_in)), wanted, 1e-12)


@settings(deadline=None, max_examples=20)
@given(forests)
def test_a_padded_batch_computes_the_forest(layout: PackedLayout):
    assume(layout.num_sequences and has_every_row_in_a_sequence(layout))
    work = work_of(layout)
    assert_close(answer_of(replicated_padded("x", work, padded_stand_in)), dense_answer(work), 1e-12)


@settings(deadline=None, max_examples=40)
@given(forests, st.data())
def test_flex_masks_by_the_forest(layout: PackedLayout, data: st.DataObject):
    assume(layout.num_rows)
    work = work_of(layout, window=data.draw(st.sampled_from(all_windows(layout))))
    row = torch.arange(layout.num_rows)
    zero = torch.tensor(0)
    mask_TT = peers.forest_mask_mod(work)(zero, zero, row[:, None], row)
    assert torch.equal(mask_TT, dense_mask(layout, work.case.window))


TREE = make_tree([5, 4, 3, 2, 6], [-1, 0, 0, 1, 1])


def test_what_is_replicated_and_what_is_not():
    work = work_of(TREE)
    # Every node ends a sequence: 0, 0-1, 0-2, 0-1-3 and 0-1-4.
    replicated = replicated_varlen("fa2", work, varlen_stand_in)
    assert replicated.leaves[0].shape[0] == 5 + 9 + 8 + 11 + 15 == replicated.dout.shape[0]
    assert (replicated.layout, replicated.is_peer) == ("replicated", True)
    padded = replicated_padded("cudnn", work, padded_stand_in)
    assert padded.leaves[0].shape == (5, 4, 15, 8) and padded.leaves[1].shape == (5, 2, 15, 8)
    copied = copied_keys("kv-copy-fa4", work, varlen_stand_in)
    assert [leaf.shape[0] for leaf in copied.leaves] == [20, 20, 20]
    assert (copied.layout, copied.is_peer) == ("shared", True)
    # Each of the five segments reads its own copy of its path.
    assert copied.details["copied_key_rows"] == str(5 + 9 + 8 + 11 + 15)


def test_every_copy_has_a_gradient_when_timed_and_one_when_checked():
    work = work_of(make_groups((3, [2, 2])))
    candidate = replicated_varlen("x", work, varlen_stand_in)
    rows = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert torch.equal(candidate.dout, work.dout_THD[rows])
    is_first = torch.tensor([row not in rows[:place] for place, row in enumerate(rows)])
    assert torch.equal(candidate.check_dout, work.dout_THD[rows] * is_first[:, None, None])


def test_copies_and_their_gradients_are_inside_the_timed_call():
    """A kernel sees copied keys, and forward makes them anew: leaves are the forest's own rows."""
    seen: list[int] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(k.shape[0])
        return varlen_stand_in(q, k, *rest)  # type: ignore[arg-type]

    candidate = copied_keys("x", work_of(make_groups((3, [2, 4]))), kernel)  # type: ignore[arg-type]
    assert not seen
    candidate.forward()
    candidate.forward()
    assert seen == [3 + 5 + 7] * 2


def test_sums_of_many_bf16_copies_are_not_rounded_on_the_way():
    copies = peers.Copies.of(np.tile(np.arange(2), 1000), 2, torch.device("cpu"))
    grads = torch.full((2000, 1, 1), 1.0, dtype=torch.bfloat16)
    assert copies.sum(grads).flatten().tolist() == [1000.0, 1000.0]
    assert copies.sum(grads).dtype == torch.float32


def test_a_row_that_no_sequence_holds_cannot_be_replicated():
    """Every case must give every row to a sequence, or replicas would be less work than the forest."""
    half_childless = make_groups((2, [1]), (3, []))
    with pytest.raises(AssertionError, match="3 of 6 rows have a copy"):
        replicated_varlen("x", work_of(half_childless), varlen_stand_in)


@pytest.mark.parametrize("name", PEERS)
def test_no_peer_runs_on_a_cpu(name: str):
    with pytest.raises(CannotRunError, match="needs a CUDA device"):
        make_peer(name, work_of(pack_documents([[1, 2]])))


def test_what_a_peer_lacks_is_said(monkeypatch: pytest.MonkeyPatch):
    windowed = work_of(make_groups((4, [3])), window=2)
    with pytest.raises(CannotRunError, match="without a window"):
        replicated_padded("cudnn", windowed, padded_stand_in)

    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers, "import_module", absent)
    with pytest.raises(CannotRunError, match=r"flash-attn-4 cannot be imported here: No module named 'flash_attn"):
        peers.load_fa4()


def test_fa4_is_called_as_its_package_documents(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, object]] = []

    class Package:
        @staticmethod
        def flash_attn_varlen_func(q: object, k: object, v: object, **named: object) -> tuple[str, str]:
            calls.append(named)
            return "out", "lse"

    monkeypatch.setattr(peers, "import_module", lambda name: {"flash_attn.cute": Package}[name])
    fa4 = peers.load_fa4()
    cu = torch.tensor([0, 3], dtype=torch.int32)
    tensor = torch.zeros(3, 1, 8)
    assert fa4(tensor, tensor, tensor, cu, cu, 3, 3, 0.5, 4) == "out"
    fa4(tensor, tensor, tensor, cu, cu, 3, 3, 0.5, None)
    # A window counts the row itself; kernels count the keys to its left.
    assert [call["window_size"] for call in calls] == [(3, 0), (None, None)]
    assert all(call["causal"] is True and call["softmax_scale"] == 0.5 for call in calls)
    assert calls[0]["max_seqlen_q"] == calls[0]["max_seqlen_k"] == 3


def test_memory_is_asked_for_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    work = work_of(make_groups((4, [3])), dtype=torch.float32)
    needed = 10_000 * 4 * 8 * 4 * peers._TENSORS_OF_OUTPUT_SIZE

    class OnGpu:
        device = torch.device("cuda", 0)
        case, q_THD = work.case, work.q_THD

    def check(free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
        peers._require_memory(OnGpu, 10_000)  # type: ignore[arg-type]

    check(needed)
    with pytest.raises(CannotRunError, match="10,000 replicated rows need about"):
        check(needed - 1)
    assert isinstance(work, Work)


@pytest.mark.parametrize("window", [None, 5])
def test_fa2_runs_forward_and_backward_as_torch_declares_it(window: int | None):
    """On tensors without data: names, order and dtypes of its arguments, and that autograd knows its gradient."""
    q, k, v = (
        torch.empty(9, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    out = peers.fa2_kernel(q, k, v, cu, cu, 5, 5, 0.25, window)
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
