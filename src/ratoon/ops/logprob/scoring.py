"""Forward: one pass over the vocabulary for log-probabilities, entropy and what backward needs of the softmax."""

# Shape letters: M scored tokens, C channels, V vocabulary; m, v: one tile of M and of V.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.ops.logprob.projection import Projection, bits_below_max, padded_tile_of, tile_of
from ratoon.ops.logprob.tiling import Range
from ratoon.ops.logprob.transform import LN_2, LogitTransform

_BELOW_ANY_LOGIT = -1e30
"""Where a row's maximum starts. Finite: -inf would give -inf - -inf in a tile whose tokens are all masked."""


@dataclass(frozen=True, slots=True)
class SoftmaxStats:
    """What backward needs to know of each row's softmax; all [M], in the accumulation dtype."""

    max_M: Tensor
    """The row's largest y of `LogitTransform`."""

    exp_sum_M: Tensor
    """Sum over the vocabulary of 2^d for d = `bits_below_max`: 1 at least, but for rounding."""

    mean_bits_M: Tensor
    """Mean of d under the softmax."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the forward pass leaves behind; all [M], in the accumulation dtype."""

    logprobs_M: Tensor
    """Nats. NaN where the target is outside the vocabulary."""

    entropy_M: Tensor
    """Nats."""

    softmax: SoftmaxStats


@dataclass(frozen=True, slots=True)
class RunningSums:
    """Sums over the tiles seen so far; all [M]. d is an entry's `bits_below_max`, y comes from `LogitTransform`."""

    transform: LogitTransform

    max_M: Tensor
    """The largest y."""

    exp_sum_M: Tensor
    """Sum of 2^d."""

    weighted_sum_M: Tensor
    """Sum of 2^d * d."""

    target_M: Tensor
    """The target's y; NaN until its tile has been seen."""

    @classmethod
    def start(cls, projection: Projection) -> "RunningSums":
        """Sums of nothing."""
        max_M, exp_sum_M, weighted_sum_M, target_M = projection.new_accumulator(4, projection.tiling.num_rows)
        return cls(
            transform=projection.transform,
            max_M=max_M.fill_(_BELOW_ANY_LOGIT),
            exp_sum_M=exp_sum_M.zero_(),
            weighted_sum_M=weighted_sum_M.zero_(),
            target_M=target_M.fill_(torch.nan),
        )

    def rows(self, rows: Range) -> "RunningSums":
        """A view of some rows."""
        m = slice(*rows)
        return RunningSums(self.transform, self.max_M[m], self.exp_sum_M[m], self.weighted_sum_M[m], self.target_M[m])

    def add_tile(self, projected_mv: Tensor, spare_mv: Tensor, inside_m: Tensor, column_m1: Tensor) -> None:
        """Adds a tile that has as many rows as these sums; overwrites both tiles."""
        picked_m = projected_mv.gather(1, column_m1).squeeze(1)
        self.target_M.copy_(torch.where(inside_m, picked_m, self.target_M))

        new_max_M = torch.maximum(self.max_M, projected_mv.amax(dim=1))
        # Old entries move to the new maximum: d + shift.
        shift_M = (self.max_M - new_max_M).mul_(self.transform.gain_out_bits)
        self.max_M.copy_(new_max_M)
        decay_M = shift_M.exp2()
        self.weighted_sum_M.addcmul_(self.exp_sum_M, shift_M).mul_(decay_M)
        self.exp_sum_M.mul_(decay_M)

        bits_mv = bits_below_max(projected_mv, new_max_M, self.transform, out_mv=projected_mv)
        exp_mv = torch.exp2(bits_mv, out=spare_mv)
        self.exp_sum_M.add_(exp_mv.sum(dim=1))
        self.weighted_sum_M.add_(bits_mv.mul_(exp_mv).sum(dim=1))

    def finish(self, target_bits_M: Tensor) -> Scores:
        """From the target's d, which it overwrites. Rounding may not turn a probability into more than 1."""
        log_sum_M = self.exp_sum_M.log2()
        mean_bits_M = self.weighted_sum_M / self.exp_sum_M
        return Scores(
            logprobs_M=target_bits_M.sub_(log_sum_M).mul_(LN_2).clamp_(max=0),
            entropy_M=(log_sum_M - mean_bits_M).mul_(LN_2).clamp_(min=0),
            softmax=SoftmaxStats(self.max_M, self.exp_sum_M, mean_bits_M),
        )


def score(projection: Projection) -> Scores:
    """Reads every weight once for all rows that are in a tile together."""
    tiling = projection.tiling
    sums = RunningSums.start(projection)
    add_tile = _fused_adder(projection) if projection.uses_kernels else _adder(projection)
    for columns in tiling.column_ranges():
        weight_vC = projection.weight_tile(columns)
        for rows in tiling.row_ranges():
            add_tile(sums.rows(rows), rows, columns, weight_vC)
    return sums.finish(_target_bits(projection, sums))


def _target_bits(projection: Projection, sums: RunningSums) -> Tensor:
    """The target's d [M], rounded as the sums' own are."""
    gain, max_M = projection.transform.gain_out_bits, sums.max_M
    if projection.uses_kernels:
        return (sums.target_M - max_M) * gain
    return torch.add(max_M * -gain, sums.target_M, alpha=gain)


_AddTile = Callable[[RunningSums, Range, Range, Tensor], None]
"""Of sums, rows, columns and weights of a tile: adds it to the sums, in place."""


def _adder(projection: Projection) -> _AddTile:
    """Two tiles of memory, operations of torch."""
    projected_buffer, spare_buffer = projection.new_accumulator(2, projection.tiling.numel)

    def add_tile(sums: RunningSums, rows: Range, columns: Range, weight_vC: Tensor) -> None:
        projected_mv = projection.project(rows, columns, weight_vC, tile_of(projected_buffer, rows, columns))
        spare_mv = tile_of(spare_buffer, rows, columns)
        sums.add_tile(projected_mv, spare_mv, *projection.locate_targets(rows, columns))

    return add_tile


def _fused_adder(projection: Projection) -> _AddTile:
    """One tile of memory, which is written once and read once."""
    from ratoon.ops.logprob.tile_kernels import add_to_sums_  # needs triton

    buffer = projection.new_accumulator(projection.tiling.padded_numel)

    def add_tile(sums: RunningSums, rows: Range, columns: Range, weight_vC: Tensor) -> None:
        out_mv = padded_tile_of(buffer, rows, columns)
        add_to_sums_(sums, projection.product_tile(rows, columns, weight_vC, out_mv))

    return add_tile
