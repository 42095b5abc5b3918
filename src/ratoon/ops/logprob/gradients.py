"""Backward: one pass that computes each tile's logits again and turns them into gradients."""

# Shape letters: M scored tokens, C channels, V vocabulary; m, v: one tile of M and of V.

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ratoon.ops.logprob.projection import Projection, add_product_, bits_below_max, padded_tile_of, tile_of
from ratoon.ops.logprob.scoring import SoftmaxStats
from ratoon.ops.logprob.tiling import Range
from ratoon.ops.logprob.transform import LN_2


@dataclass(frozen=True, slots=True)
class RowGrads:
    """What turns a row's softmax into the gradient of its logits; all [M], in the accumulation dtype.

    With p = softmax(logits) and target t, in nats:
    d loss / d logit_j = grad_logprob * (1[j = t] - p_j) - grad_entropy * p_j * (log p_j + entropy).

    With e = 2^d for d = `bits_below_max`, p is e / exp_sum and log p + entropy is ln 2 * (d - mean d): the maximum,
    which may be large, is subtracted by itself, and the rest goes into factors of the row.
    """

    max_M: Tensor
    """The row's largest y of `LogitTransform`."""

    at_target_M: Tensor | None
    """grad_logprob; None when only the entropy was used."""

    per_e_M: Tensor
    """What multiplies e."""

    per_e_d_M: Tensor | None
    """What multiplies e * d; None when the entropy was not used."""

    @classmethod
    def build(cls, softmax: SoftmaxStats, grad_logprobs_M: Tensor | None, grad_entropy_M: Tensor | None) -> "RowGrads":
        """A gradient that is None was not used by the loss, and its terms are skipped."""
        per_p_M = torch.zeros_like(softmax.exp_sum_M) if grad_logprobs_M is None else -grad_logprobs_M
        per_e_d_M = None
        if grad_entropy_M is not None:
            per_p_d_M = grad_entropy_M * -LN_2
            per_p_M = per_p_M - per_p_d_M * softmax.mean_bits_M
            per_e_d_M = per_p_d_M / softmax.exp_sum_M
        return cls(
            max_M=softmax.max_M,
            # A sum's gradient is one number with stride 0.
            at_target_M=None if grad_logprobs_M is None else grad_logprobs_M.contiguous(),
            per_e_M=per_p_M / softmax.exp_sum_M,
            per_e_d_M=per_e_d_M,
        )

    def rows(self, rows: Range) -> "RowGrads":
        """A view of some rows."""
        m = slice(*rows)
        return RowGrads(
            max_M=self.max_M[m],
            at_target_M=None if self.at_target_M is None else self.at_target_M[m],
            per_e_M=self.per_e_M[m],
            per_e_d_M=None if self.per_e_d_M is None else self.per_e_d_M[m],
        )


class _LogitGrads(Protocol):
    """Gradient of (hidden @ weight.T + bias), but for the factor `slope`, a tile at a time in buffers it reuses."""

    def tile(self, rows: Range, columns: Range, weight_vC: Tensor) -> Tensor:
        """[m, v] in the accumulation dtype or weight_vC's; valid until the next call."""
        ...


class _FusedLogitGrads:
    """Written once, in the dtype of the products it goes into: over the logits where that is theirs."""

    def __init__(self, projection: Projection, row_grads: RowGrads) -> None:
        self._projection = projection
        self._row_grads = row_grads
        numel = projection.tiling.padded_numel
        self._logits = self._grads = projection.new_accumulator(numel)
        if projection.hidden_MC.dtype != projection.accumulate_dtype:
            self._grads = projection.hidden_MC.new_empty(numel)

    def tile(self, rows: Range, columns: Range, weight_vC: Tensor) -> Tensor:
        """In weight_vC's dtype."""
        from ratoon.ops.logprob.tile_kernels import write_logit_grads  # needs triton

        product_mv = padded_tile_of(self._logits, rows, columns)
        grad_mv = padded_tile_of(self._grads, rows, columns)
        tile = self._projection.product_tile(rows, columns, weight_vC, product_mv)
        write_logit_grads(tile, self._row_grads.rows(rows), grad_mv)
        return grad_mv


class _TorchLogitGrads:
    """In the accumulation dtype, by operations of torch."""

    def __init__(self, projection: Projection, row_grads: RowGrads) -> None:
        self._projection = projection
        self._row_grads = row_grads
        # The capped logits' tanh, and the softmax beside its logarithm, need a tile each.
        num_buffers = 1 + (projection.transform.softcap is not None) + (row_grads.per_e_d_M is not None)
        self._buffers = projection.new_accumulator(num_buffers, projection.tiling.numel).unbind()

    def tile(self, rows: Range, columns: Range, weight_vC: Tensor) -> Tensor:
        """In the accumulation dtype."""
        grads, transform = self._row_grads, self._projection.transform
        m = slice(*rows)
        tiles = [tile_of(buffer, rows, columns) for buffer in self._buffers]

        projected_mv = self._projection.project(rows, columns, weight_vC, tiles[0])
        # With a cap the derivative of tanh is needed at the end, from tanh itself.
        out_mv = tiles[0] if transform.softcap is None else tiles[1]
        bits_mv = bits_below_max(projected_mv, grads.max_M[m], transform, out_mv)
        per_e_m1 = grads.per_e_M[m].unsqueeze(1)
        if grads.per_e_d_M is None:
            grad_mv = bits_mv.exp2_().mul_(per_e_m1)
        else:
            grad_mv = torch.exp2(bits_mv, out=tiles[-1])
            grad_mv.mul_(bits_mv.mul_(grads.per_e_d_M[m].unsqueeze(1)).add_(per_e_m1))

        if grads.at_target_M is not None:
            inside_m, column_m1 = self._projection.locate_targets(rows, columns)
            at_target_m = grads.at_target_M[m]
            # One entry a row: nothing depends on the order of additions.
            grad_mv.scatter_add_(1, column_m1, torch.where(inside_m, at_target_m, 0).unsqueeze(1))
        if transform.softcap is not None:
            if self._projection.kept is not None:
                projected_mv.clamp_(min=-1.0)  # tanh lies above; what is left out would make 0 * inf
            grad_mv.addcmul_(grad_mv, projected_mv.square_(), value=-1.0)
        return grad_mv


@dataclass(frozen=True, slots=True)
class InputGrads:
    """Gradients of the projection's inputs; None where not wanted."""

    hidden_MC: Tensor | None
    """In the accumulation dtype."""

    weight_VC: Tensor | None
    """In the weight's dtype; summed over M in the accumulation dtype."""

    bias_V: Tensor | None
    """In the accumulation dtype."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which inputs' gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool


def input_grads(projection: Projection, row_grads: RowGrads, wanted: Wanted) -> InputGrads:
    """Every piece of the weight's gradient is finished before the next begins."""
    M, C = projection.hidden_MC.shape
    tiling, slope = projection.tiling, projection.transform.slope
    V = tiling.num_columns
    grads = InputGrads(
        hidden_MC=projection.new_accumulator(M, C) if wanted.hidden else None,
        weight_VC=projection.weight_VC.new_empty(V, C) if wanted.weight else None,
        bias_V=projection.new_accumulator(V).zero_() if wanted.bias else None,
    )
    make_logit_grads = _FusedLogitGrads if projection.uses_kernels else _TorchLogitGrads
    logit_grads: _LogitGrads = make_logit_grads(projection, row_grads)
    for columns in tiling.column_ranges():
        v = slice(*columns)
        weight_vC = projection.weight_tile(columns)
        weight_grad_vC = None
        if grads.weight_VC is not None:
            # The gradient's own memory if the dtypes agree, else one piece widened.
            widened = grads.weight_VC.dtype != projection.accumulate_dtype
            weight_grad_vC = projection.new_accumulator(columns[1] - columns[0], C) if widened else grads.weight_VC[v]
            if M == 0:
                weight_grad_vC.zero_()
        for rows in tiling.row_ranges():
            m = slice(*rows)
            grad_mv = logit_grads.tile(rows, columns, weight_vC)
            if grads.bias_V is not None:
                grads.bias_V[v].add_(grad_mv.sum(dim=0, dtype=projection.accumulate_dtype), alpha=slope)
            grad_mv = grad_mv.to(weight_vC.dtype)
            if grads.hidden_MC is not None:
                # The first product overwrites what memory held.
                beta = 0 if columns[0] == 0 else 1
                add_product_(grads.hidden_MC[m], grad_mv, weight_vC, beta=beta, alpha=slope)
            if weight_grad_vC is not None:
                beta = 0 if rows[0] == 0 else 1
                add_product_(weight_grad_vC, grad_mv.t(), projection.hidden_MC[m], beta=beta, alpha=slope)
        if grads.weight_VC is not None and weight_grad_vC is not None:
            grads.weight_VC[v].copy_(weight_grad_vC)  # nothing to do where it is the same memory
    return grads
