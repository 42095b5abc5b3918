"""Ranks that hold one microbatch together: each has a block of its rows, and inside attention all rows of some heads.

The exchange is that of DeepSpeed-Ulysses (arXiv:2309.14509). All collectives here depend on the layout and on the
model's sizes alone, so that all ranks of a group start the same ones in the same order, in backward too.
"""

# Shape letters: U ranks of a group, T rows, B rows of one rank (T / U), H heads (Hq query, Hkv key and value), h heads
# of one rank inside attention, D head dim, E value head dim, F numbers that a row sends to one rank, C channels,
# M scored tokens, X rows sent, Y rows received.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ratoon.distributed.data_parallel import CollectiveError
from ratoon.distributed.lost_rank import describe_loss
from ratoon.types import UserError

DATA_AXIS, SEQUENCE_AXIS = "data", "sequence"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceGroup:
    """This process's place among the ranks that hold one microbatch together, and the group's among the groups.

    All ranks of a group compute the same loss of all M scored tokens; their parameters' gradients are parts of a sum.
    The sum over the ranks of all groups is the step's gradient.
    """

    rank: int
    """In the group: which block of rows and which heads."""

    size: int

    data_rank: int = 0
    """Which group: whose microbatches of the plan are worked on."""

    num_data_ranks: int = 1

    process_group: dist.ProcessGroup | None = None
    """None for a group of one."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of a group of {self.size}"
        assert (self.process_group is None) == (self.size == 1), "a group of several ranks needs a process group"

    def __deepcopy__(self, _: Any) -> "SequenceGroup":
        """A copy of a model is held by the same ranks."""
        return self

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that counts the group's tokens, losses and metrics."""
        return self.rank == 0

    def padded(self, num_rows: int) -> int:
        """The rows of a layout that all ranks get the same number of, at least one each."""
        return max(-(-num_rows // self.size), 1) * self.size

    def block(self, num_rows: int) -> slice:
        """This rank's rows of a padded layout."""
        size = num_rows // self.size
        assert size * self.size == num_rows, f"{num_rows} rows cannot be cut into {self.size} equal blocks"
        return slice(self.rank * size, (self.rank + 1) * size)


def ranks_mesh(device_type: str, degree: int) -> DeviceMesh:
    """All ranks of the default process group on two axes, `data` and `sequence`; the latter has `degree` ranks.

    Neighbours (of one host, as torchrun counts) hold a microbatch together. Weights are sharded over both axes, which
    is what `shard_mesh` spans. Raises UserError where `degree` does not divide the number of ranks.
    """
    num_ranks = dist.get_world_size()
    if degree < 1 or num_ranks % degree:
        known = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
        raise UserError(
            f"sequence parallelism of {degree} does not divide {num_ranks} ranks into groups of that many; "
            f"with {num_ranks} ranks it can be {', '.join(map(str, known))}"
        )
    return init_device_mesh(device_type, (num_ranks // degree, degree), mesh_dim_names=(DATA_AXIS, SEQUENCE_AXIS))


def sequence_group(mesh: DeviceMesh, *, timeout_s: float = 600.0) -> SequenceGroup:
    """This rank's group on a mesh of `ranks_mesh`. All ranks must call it together.

    timeout_s: limit of every collective in the group: on the CPU it ends in a CollectiveError, on CUDA by NCCL's
    watchdog ending the process.
    """
    rank, size = mesh.get_local_rank(SEQUENCE_AXIS), mesh.size(1)
    data_rank, num_data_ranks = mesh.get_local_rank(DATA_AXIS), mesh.size(0)
    own = None
    # Not the mesh's own: where one group is all ranks that is the default group, and heads would queue behind weights.
    for ranks in mesh.mesh.tolist() if size > 1 else []:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), group_desc=SEQUENCE_AXIS)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup), "a rank is a member of its own group"
            own = group
    return SequenceGroup(rank=rank, size=size, data_rank=data_rank, num_data_ranks=num_data_ranks, process_group=own)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Which heads each rank attends with. Exact for every Hkv that divides Hq, also where it is below the degree."""

    num_heads: int
    num_kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, f"{self.num_kv_heads} kv heads for {self.num_heads} heads"
        assert self.num_heads % self.degree == 0, f"{self.num_heads} heads on {self.degree} ranks"

    @property
    def own_heads(self) -> int:
        """Query heads of each rank."""
        return self.num_heads // self.degree

    @property
    def own_kv_heads(self) -> int:
        """Key and value heads of each rank: one for every `_run` query heads, as grouped attention wants them."""
        return self.own_heads // self._run

    @property
    def kv_copies(self) -> int:
        """How many times each key and value head is sent; 1 where the degree divides Hkv."""
        return self.num_heads // self.num_kv_heads // self._run

    @property
    def _run(self) -> int:
        """The longest runs of query heads that lie on one rank and read one kv head, everywhere."""
        return math.gcd(self.own_heads, self.num_heads // self.num_kv_heads)


def scatter_heads(q_BHD: Tensor, k_BHD: Tensor, v_BHE: Tensor, group: SequenceGroup) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rows of all heads, to all rows of this rank's heads; differentiable, one collective each way.

    q_BHD: [B, Hq, D]; the group's size divides Hq. k_BHD: [B, Hkv, D] and v_BHE: [B, Hkv, E]; Hkv divides Hq. Of one
    dtype. Returns [T, h, D], [T, hkv, D], [T, hkv, E], where query head i reads kv head i // (h / hkv). Gradients of a
    kv head that went to several ranks are summed in float32 (float64) and rounded once.
    """
    assert q_BHD.dtype == k_BHD.dtype == v_BHE.dtype, f"{q_BHD.dtype}, {k_BHD.dtype} and {v_BHE.dtype} in one buffer"
    return _ScatterHeads.apply(q_BHD, k_BHD, v_BHE, group)


def gather_heads(out_ThE: Tensor, group: SequenceGroup) -> Tensor:
    """[T, h, E] of this rank's heads, to [B, Hq, E]: this rank's rows of all heads. Differentiable."""
    return _GatherHeads.apply(out_ThE, group)


def own_heads(values_H: Tensor, group: SequenceGroup) -> Tensor:
    """[h] of [Hq]: this rank's, of what each query head has one of. A view."""
    return values_H.chunk(group.size)[group.rank]


def exchange_rows(
    rows_XC: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: SequenceGroup
) -> Tensor:
    """Rows for each rank, one rank's after another's, to the rows that each rank has sent here. Differentiable.

    send_counts, receive_counts: [U], how many rows go to and come from each rank; any may be 0.
    """
    return _ExchangeRows.apply(rows_XC, tuple(send_counts), tuple(receive_counts), group)


def gather_shares(shares: Sequence[Tensor], num_total: int, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Every rank's share of each vector, one after another: [num_total] each, the same on every rank.

    shares: this rank's, alike in dtype and length. Shares are `share_of` of the total.

    Differentiable: every rank is taken to compute the same loss of the whole, so that a share's gradient is its part of
    the whole's, without a sum and without communication.
    """
    return _GatherShares.apply(group, num_total, *shares)


def share_of(num_total: int, group: SequenceGroup, rank: int | None = None) -> slice:
    """The part of `num_total` things that a rank (this one if None) takes: equal but for the last ones, maybe empty."""
    size = -(-num_total // group.size)
    rank = group.rank if rank is None else rank
    return slice(min(rank * size, num_total), min((rank + 1) * size, num_total))


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHD: Tensor, k_BHD: Tensor, v_BHE: Tensor, group: SequenceGroup) -> tuple[Tensor, ...]:
        shares = HeadShares(q_BHD.shape[1], k_BHD.shape[1], group.size)
        ctx.group, ctx.shares = group, shares
        if shares.kv_copies > 1:
            k_BHD, v_BHE = (x.repeat_interleave(shares.kv_copies, dim=1) for x in (k_BHD, v_BHE))
        U = group.size
        by_rank = [x.unflatten(1, (U, x.shape[1] // U)).transpose(0, 1) for x in (q_BHD, k_BHD, v_BHE)]
        ctx.sizes = [(x.shape[2], x.shape[3]) for x in by_rank]
        send_UBF = q_BHD.new_empty(U, q_BHD.shape[0], sum(math.prod(size) for size in ctx.sizes))
        for part, x_UBhD in zip(_parts(send_UBF, ctx.sizes), by_rank, strict=True):
            part.copy_(x_UBhD)
        received_UBF = _all_to_all(send_UBF, group, "heads of queries, keys and values")
        return tuple(_parts(received_UBF.flatten(0, 1), ctx.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_ThD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group, copies = ctx.group, ctx.shares.kv_copies
        T = grads_ThD[0].shape[0]
        send_TF = grads_ThD[0].new_empty(T, sum(math.prod(size) for size in ctx.sizes))
        for part, grad_ThD in zip(_parts(send_TF, ctx.sizes), grads_ThD, strict=True):
            part.copy_(grad_ThD)
        received_UBF = _all_to_all(
            send_TF.unflatten(0, (group.size, T // group.size)), group, "gradients of queries, keys and values"
        )
        q_BHD, k_BHD, v_BHE = (x.transpose(0, 1).flatten(1, 2) for x in _parts(received_UBF, ctx.sizes))
        if copies > 1:
            k_BHD, v_BHE = (x.unflatten(1, (-1, copies)).sum(dim=2) for x in (k_BHD, v_BHE))
        return q_BHD, k_BHD, v_BHE, None


def _parts(buffer_F: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views [..., heads, head dim] of a buffer's last dim, one after another."""
    widths = [math.prod(size) for size in sizes]
    return [part.unflatten(-1, size) for part, size in zip(buffer_F.split(widths, dim=-1), sizes, strict=True)]


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_ThE: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        T = out_ThE.shape[0]
        by_rank_UBhE = out_ThE.contiguous().unflatten(0, (group.size, T // group.size))
        return _all_to_all(by_rank_UBhE, group, "heads of attention's output").transpose(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BHE: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = ctx.group
        by_rank_UBhE = dout_BHE.unflatten(1, (group.size, dout_BHE.shape[1] // group.size)).transpose(0, 1)
        received_UBhE = _all_to_all(by_rank_UBhE.contiguous(), group, "gradients of attention's output")
        return received_UBhE.flatten(0, 1), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_XC: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: SequenceGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows_XC, send, receive, group, "rows that predict scored tokens")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_YC: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_XC = _exchange(grad_YC, ctx.receive, ctx.send, ctx.group, "gradients of rows that predict scored tokens")
        return grad_XC, None, None, None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, num_total: int, *shares: Tensor) -> tuple[Tensor, ...]:
        ctx.share = share_of(num_total, group)
        largest = share_of(num_total, group, 0).stop
        num_own = ctx.share.stop - ctx.share.start
        assert all(share.shape == (num_own,) for share in shares), f"a share is [{num_own}]"
        sent = shares[0].new_zeros(len(shares), largest)
        for row, share in zip(sent, shares, strict=True):
            row[:num_own] = share
        received = sent.new_empty(group.size, len(shares), largest)
        _run(group, "shares of log-probs", lambda: dist.all_gather(list(received), sent, group=group.process_group))
        # A result that the loss does not use has the gradient None, and its terms are skipped.
        ctx.set_materialize_grads(False)
        by_vector = received.transpose(0, 1).flatten(1, 2)
        return tuple(whole[:num_total].clone() for whole in by_vector)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *(None if grad is None else grad[ctx.share] for grad in grads)


def _all_to_all(send_UX: Tensor, group: SequenceGroup, what: str) -> Tensor:
    """Entry u of the first dim goes to rank u; entry u of the result has come from it. send_UX is contiguous."""
    assert send_UX.is_contiguous() and send_UX.shape[0] == group.size, f"{what}: {tuple(send_UX.shape)}"
    received_UX = torch.empty_like(send_UX)
    _run(group, what, lambda: dist.all_to_all_single(received_UX, send_UX, group=group.process_group))
    return received_UX


def _exchange(rows_XC: Tensor, send: Sequence[int], receive: Sequence[int], group: SequenceGroup, what: str) -> Tensor:
    assert rows_XC.shape[0] == sum(send), f"{what}: {rows_XC.shape[0]} rows for {send}"
    received_YC = rows_XC.new_empty(sum(receive), rows_XC.shape[1])
    _run(
        group,
        what,
        lambda: dist.all_to_all_single(
            received_YC, rows_XC.contiguous(), list(receive), list(send), group=group.process_group
        ),
    )
    return received_YC


def _run(group: SequenceGroup, what: str, collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        waiter = f"rank {group.rank} of {group.size} that hold microbatches together (group {group.data_rank})"
        members = dist.get_process_group_ranks(group.process_group)
        others = ", ".join(str(rank) for place, rank in enumerate(members) if place != group.rank)
        who = f"rank {others}" if group.size == 2 else f"one of the ranks {others}"
        raise CollectiveError(describe_loss(who, what, error, waiter=waiter)) from error
