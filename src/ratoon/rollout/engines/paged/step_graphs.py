"""One decode step as a CUDA graph for each of a few sizes of batch."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Output = TypeVar("Output")

_EVERY = 32
"""Sizes of more rows than this are multiples of it; smaller ones are powers of two."""


_FEWEST = 2
"""A compiler takes one row for a shape of its own: the last response to end would wait for its graphs."""


def padded_rows(num_rows: int) -> int:
    """The size of a batch that a step of so many rows runs as."""
    if num_rows > _EVERY:
        return -(-num_rows // _EVERY) * _EVERY
    return max(_FEWEST, 1 << (num_rows - 1).bit_length())


class StepGraphs(Generic[Output]):
    """`step(size)`, recorded at its first call of a size and repeated from then on; without graphs it just runs.

    The tensors that it reads and writes stay where they are, as do what it returns.
    """

    def __init__(self, step: Callable[[int], Output], device: torch.device, *, records: bool) -> None:
        """records: on a GPU, whose host takes no part in the step. On a CPU nothing is recorded."""
        self._step = step
        self._device = device
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and records else None

    def is_ready(self, size: int) -> bool:
        return self._pool is None or size in self._recorded

    def record(self, size: int) -> None:
        """Runs the step, and once more to record it: call it where what they write is lost on nobody."""
        # On a stream of its own, as a recording must be; what it compiles is compiled before.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: a trainer's, another engine's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._step(size)
        self._recorded[size] = graph, output

    def __call__(self, size: int) -> Output:
        """What it returns is overwritten by the next call of any size."""
        if self._pool is None:
            return self._step(size)
        graph, output = self._recorded[size]
        graph.replay()
        return output
