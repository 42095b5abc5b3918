"""Ranks that hold the same parameters and different microbatches."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ratoon.distributed.lost_rank import describe_loss, other_than, whom_barrier_names

Value = TypeVar("Value")

BUCKET_BYTES = 32 * 1024 * 1024
"""Largest buffer that one collective of gradients or parameters sends."""


class CollectiveError(RuntimeError):
    """A collective failed or ran out of time: another rank died, hangs, or runs other code."""


@dataclass(frozen=True, slots=True)
class DataParallel:
    """This process's place among the ranks of a run. With one rank, every method is a local no-op.

    All ranks must call the same methods in the same order. The sequence of collectives inside a method depends on the
    shapes of the parameters alone, never on which gradients exist. Each collective ends within `timeout_s`: on the
    CPU with a CollectiveError naming it, on CUDA by NCCL's watchdog ending the process.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    """Index among the ranks of this host, and of its GPU."""

    timeout_s: float = 600.0

    control_group: dist.ProcessGroup | None = None
    """A gloo group for host tensors; None is the default group."""

    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in [0, world_size), got rank {self.rank} of {self.world_size}")
        assert self.bucket_bytes >= 16, f"a bucket holds at least one element, got {self.bucket_bytes} bytes"

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    @torch.no_grad()
    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces every parameter's `.grad` by its sum over ranks, bitwise the same on all of them.

        It is a sum: losses are divided by denominators of the whole step before backward. A gradient that this rank
        lacks (it was idle, or routed no token there) counts as zeros; one that every rank lacks stays None, as it would
        with one rank. 16-bit gradients are summed in float32 and rounded once.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if self.world_size == 1:
            return
        has_grad = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        self._run("which gradients exist", lambda: dist.all_reduce(has_grad, group=self.control_group))
        grads: list[Tensor] = []
        for parameter, count in zip(trained, has_grad.tolist(), strict=True):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            grads.append(parameter.grad)
        for number, pieces in enumerate(_buckets(grads, self.bucket_bytes)):
            buffer = torch.cat([piece.to(_sum_dtype(piece)) for piece in pieces])
            self._run(f"sum of gradients, bucket {number}", lambda buffer=buffer: dist.all_reduce(buffer))
            _scatter_back(buffer, pieces)

    def all_reduce_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each named value summed over ranks in float64. All ranks must give the same names."""
        return self._all_reduce_values("sum", values, dist.ReduceOp.SUM)

    def all_reduce_maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each named value's largest over ranks. All ranks must give the same names."""
        return self._all_reduce_values("maximum", values, dist.ReduceOp.MAX)

    @torch.no_grad()
    def broadcast_parameters(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrites parameters (or buffers) by those of rank `source`, bit by bit.

        Raises CollectiveError when the ranks' tensors differ in number, shape or dtype.
        """
        given = list(tensors)
        if self.world_size == 1:
            return
        description = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in given])
        self._check_same_on_all_ranks("shapes and dtypes of parameters", description)
        as_bytes = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in given]
        for number, pieces in enumerate(_buckets(as_bytes, self.bucket_bytes)):
            buffer = torch.cat(pieces)
            self._run(f"broadcast of parameters, bucket {number}", lambda buffer=buffer: dist.broadcast(buffer, source))
            _scatter_back(buffer, pieces)
        for tensor, received in zip(given, as_bytes, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(received.view(tensor.dtype).view(tensor.shape))

    def all_gather(self, what: str, value: Value) -> list[Value]:
        """Each rank's `value`, which pickle can write, in the order of ranks. what: names the exchange in errors.

        Raises CollectiveError where a rank does not come; on rank 0 it names the ranks.
        """
        if self.world_size == 1:
            return [value]
        self.barrier(what=what)
        values: list[Any] = [None] * self.world_size
        self._run(what, lambda: dist.all_gather_object(values, value, group=self.control_group))
        return values

    def broadcast(self, what: str, value: Value) -> Value:
        """Rank 0's `value`, which pickle can write, on every rank. Otherwise as `all_gather`."""
        if self.world_size == 1:
            return value
        self.barrier(what=what)
        sent: list[Any] = [value]
        self._run(what, lambda: dist.broadcast_object_list(sent, 0, group=self.control_group))
        return sent[0]

    def barrier(self, timeout_s: float | None = None, *, what: str = "barrier") -> None:
        """Returns once every rank has come here. what: names the occasion in errors.

        Raises CollectiveError after `timeout_s`; on rank 0 it names the ranks that did not come.
        """
        if self.world_size == 1:
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        try:
            dist.monitored_barrier(self.control_group, timedelta(seconds=limit_s), wait_all_ranks=True)
        except RuntimeError as error:
            # Every other rank waits for rank 0, which answers once all have come.
            answering = "rank 0" if self.world_size == 2 else "rank 0, or one that it waits for,"
            who = whom_barrier_names(error) if self.is_main else answering
            waited_s = time.monotonic() - started
            raise self._error(what, error, who=who, limit_s=limit_s, waited_s=waited_s) from error

    def close(self) -> None:
        """Leaves the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _all_reduce_values(
        self, what: str, values: Mapping[str, float], operation: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        names = sorted(values)
        reduced = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        if self.world_size > 1:
            self._check_same_on_all_ranks(f"names in a {what}", repr(names))
            label = f"{what} of {', '.join(names)}"
            self._run(label, lambda: dist.all_reduce(reduced, operation, group=self.control_group))
        return dict(zip(names, reduced.tolist(), strict=True))

    def _check_same_on_all_ranks(self, what: str, description: str) -> None:
        digest = hashlib.sha256(description.encode()).digest()
        mine = torch.tensor([int.from_bytes(digest[:7], "big")], dtype=torch.int64)
        all_ranks = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._run(f"comparison of {what}", lambda: dist.all_gather(all_ranks, mine, group=self.control_group))
        different = [rank for rank, theirs in enumerate(all_ranks) if not torch.equal(theirs, all_ranks[0])]
        if different:
            raise CollectiveError(
                f"{what} differ between ranks: ranks {different} do not hold what rank 0 holds; this rank "
                f"{self.rank} has {description[:400]}; start every rank with the same recipe and code"
            )

    def _run(self, what: str, collective: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            raise self._error(what, error, waited_s=time.monotonic() - started) from error

    def _error(
        self,
        what: str,
        error: RuntimeError,
        *,
        who: str | None = None,
        limit_s: float | None = None,
        waited_s: float = 0.0,
    ) -> CollectiveError:
        return CollectiveError(
            describe_loss(
                who or other_than(self.rank, self.world_size),
                what,
                error,
                waiter=f"rank {self.rank} of {self.world_size}",
                limit_s=self.timeout_s if limit_s is None else limit_s,
                waited_s=waited_s,
            )
        )

    def named(self, error: BaseException) -> BaseException:
        """The error under a name that says what happened, where it came of a collective that torch ran by itself: in
        the passes of a sharded model, or in a checkpoint."""
        if self.world_size == 1 or isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
            return error
        is_torchs = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        return self._error("weights or gradients", error) if is_torchs else error


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Cuts contiguous tensors, in order, into lists of flat views that one buffer of `bucket_bytes` can hold.

    A bucket holds one device and one dtype. Depends on shapes, dtypes and devices only.
    """
    bucket: list[Tensor] = []
    room_bytes = bucket_bytes
    for tensor in tensors:
        flat = tensor.view(-1)
        size = _sum_dtype(flat).itemsize
        start = 0
        while start < flat.numel():
            is_other_kind = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (flat.dtype, flat.device)
            if is_other_kind or room_bytes < size:
                yield bucket
                bucket, room_bytes = [], bucket_bytes
            count = min(flat.numel() - start, room_bytes // size)
            bucket.append(flat[start : start + count])
            start += count
            room_bytes -= count * size
    if bucket:
        yield bucket


def _scatter_back(buffer: Tensor, pieces: Sequence[Tensor]) -> None:
    for piece, values in zip(pieces, buffer.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(values)
