"""Logits and gradients at (scored token, kept token) pairs alone, a piece of the pairs at a time."""

# Shape letters: M scored tokens, C channels, V vocabulary, J kept pairs, S segments of pairs; j, s: of one piece.

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ratoon.ops.logprob.kept_sets import KeptSets, Segments
from ratoon.ops.logprob.projection import accumulate_dtype_of
from ratoon.ops.logprob.transform import LogitTransform

MIB = 1 << 20

CPU_PIECE_BYTES = 1 * MIB
CUDA_PIECE_BYTES = 128 * MIB
"""One [j, C] in the accumulation dtype; at most three of its size live at a time, the gathered rows among them. On a
CPU it stays in the outer caches; on a GPU it pays for its kernel launches."""


@dataclass(frozen=True, slots=True)
class KeptPairs:
    """One call's inputs, and the pairs whose logits it evaluates."""

    hidden_MC: Tensor
    weight_VC: Tensor
    bias_V: Tensor | None
    sets: KeptSets
    transform: LogitTransform

    @property
    def piece_pairs(self) -> int:
        """Pairs of one piece, at least one."""
        budget = CUDA_PIECE_BYTES if self.hidden_MC.device.type == "cuda" else CPU_PIECE_BYTES
        itemsize = accumulate_dtype_of(self.hidden_MC.dtype).itemsize
        return max(1, budget // (itemsize * max(1, self.hidden_MC.shape[1])))

    def project(self) -> Tensor:
        """[J] fp64: y of `LogitTransform`, from products summed in the accumulation dtype."""
        accumulate_dtype = accumulate_dtype_of(self.hidden_MC.dtype)
        y_J = torch.empty(self.sets.rows.num_pairs, dtype=torch.float64, device=self.hidden_MC.device)
        for start in range(0, self.sets.rows.num_pairs, self.piece_pairs):
            piece = slice(start, start + self.piece_pairs)
            product_jC = self.weight_VC.index_select(0, self.sets.token_J[piece]).to(accumulate_dtype)
            product_jC.mul_(self.hidden_MC.index_select(0, self.sets.row_J[piece]))
            y_J[piece] = product_jC.sum(dim=1)
        if self.bias_V is not None:
            y_J += self.bias_V.index_select(0, self.sets.token_J)
        y_J *= self.transform.gain_in
        return y_J if self.transform.softcap is None else y_J.tanh_()

    def hidden_grad(self, grad_J: Tensor) -> Tensor:
        """[M, C] in hidden's dtype; grad_J: gradient of (hidden @ weight.T + bias) at the pairs."""
        grad_MC = torch.empty_like(self.hidden_MC, memory_format=torch.contiguous_format)
        place_M = torch.arange(grad_MC.shape[0], device=grad_MC.device)
        _write_sums(grad_MC, place_M, self.sets.rows, grad_J, self.weight_VC, self.sets.token_J, self.piece_pairs)
        return grad_MC

    def vocabulary_grads(self, grad_J: Tensor, *, weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """[V, C] and [V] in the weight's dtype, 0 at tokens that nobody kept; None where not asked for.

        A token's pairs are added up in the order of the scored tokens: no atomics, the same bits in every run.
        """
        order_J = torch.argsort(self.sets.token_J, stable=True)
        token_S, length_S = torch.unique_consecutive(self.sets.token_J.index_select(0, order_J), return_counts=True)
        token_S = token_S.to(torch.int64)
        tokens = Segments(np.concatenate([np.zeros(1, np.int64), np.cumsum(length_S.cpu().numpy(), dtype=np.int64)]))
        grad_J = grad_J.index_select(0, order_J)
        grad_VC = grad_V = None
        if weight:
            grad_VC = torch.zeros_like(self.weight_VC, memory_format=torch.contiguous_format)
            row_J = self.sets.row_J.index_select(0, order_J)
            _write_sums(grad_VC, token_S, tokens, grad_J, self.hidden_MC, row_J, self.piece_pairs)
        if bias:
            grad_V = self.weight_VC.new_zeros(self.weight_VC.shape[0])
            grad_V.index_copy_(0, token_S, tokens.sums(grad_J.double()).to(grad_V.dtype))
        return grad_VC, grad_V


def _write_sums(
    out_XC: Tensor,
    place_S: Tensor,
    segments: Segments,
    scale_J: Tensor,
    source_YC: Tensor,
    index_J: Tensor,
    piece_pairs: int,
) -> None:
    """out[place[s]] = sum over the pairs of segment s of scale * source[index], in scale's dtype and rounded once."""
    carried_C: Tensor | None = None
    for piece in segments.pieces(piece_pairs):
        index_j, scale_j = index_J[piece.pairs], scale_J[piece.pairs]
        table = source_YC
        if source_YC.dtype != scale_J.dtype:
            table = source_YC.index_select(0, index_j).to(scale_J.dtype)
            index_j = torch.arange(index_j.numel(), dtype=torch.int32, device=index_j.device)
        sums_sC = functional.embedding_bag(
            index_j,
            table,
            torch.from_numpy(piece.offsets).to(index_j.device),
            mode="sum",
            per_sample_weights=scale_j,
            include_last_offset=True,
        )
        if carried_C is not None:
            sums_sC[0] += carried_C
        # A segment that goes on is written again, with its rest, by the piece in which it ends.
        carried_C = sums_sC[-1].clone() if piece.is_cut else None
        out_XC.index_copy_(0, place_S[piece.segments], sums_sC.to(out_XC.dtype))
