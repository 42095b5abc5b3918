"""What a provider's forward pass leaves for its backward pass."""

# Shape letters: T rows, H query heads, D head dim.

from typing import NamedTuple

from torch import Tensor


class MergedRows(NamedTuple):
    """Every row's attention over all its keys, merged from the parts of all levels."""

    out_THD: Tensor
    """[T, Hq, D] in q's dtype or a wider one."""

    lse_TH: Tensor
    """[T, Hq] log-sum-exp of the scaled scores. fp32, or fp64 for fp64."""

    dropout_state: tuple[Tensor, ...] = ()
    """What a CUDA backward kernel would draw from under dropout. It is never on, but the kernel must be given it."""
