"""Weights in pieces of bounded size, so that no device holds a second copy of a model while it is sent."""

from collections.abc import Iterable, Iterator

from torch import Tensor


def iter_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The same tensors in the same order, in runs of at most `max_bytes` together; a larger tensor stands alone.

    Lazy: a tensor is taken from `named` once all that were yielded before have been used, but for the one that did not
    fit. The caller drops a bucket before it asks for the next one. No bucket is empty, and no tensor is cut.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if bucket and num_bytes + size > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += size
        if num_bytes >= max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket
