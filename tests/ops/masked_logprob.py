"""The oracle for `support_logprob`: log-softmax of the whole row, what was left out at minus infinity."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from typing import Any

import numpy as np
import pytest
import torch
from tests.ops.eager_logprob import Case, Outcome, eager_logits
from torch import Tensor

from ratoon.ops import support_logprob
from ratoon.ops.logprob import kept_pairs, tiling
from ratoon.types import SampledSupport


def make_support(target_M: Tensor, V: int, *, seed: int = 0, most: int | None = None) -> SampledSupport:
    """Random kept sets, from the target alone to `most` tokens or all V."""
    rng = np.random.default_rng(seed)
    most = V if most is None else most
    rows: list[np.ndarray] = []
    for target in target_M.tolist():
        others = rng.permutation(V)[: rng.integers(0, most)]
        rows.append(np.union1d(others, [target]).astype(np.int32))
    return SampledSupport.of(rows)


def whole_vocabulary(M: int, V: int) -> SampledSupport:
    return SampledSupport(np.arange(M + 1) * V, np.tile(np.arange(V, dtype=np.int32), M))


def kept_mask(support: SampledSupport, V: int) -> Tensor:
    mask_MV = torch.zeros(support.num_tokens, V, dtype=torch.bool)
    rows = np.repeat(np.arange(support.num_tokens), np.diff(support.offsets))
    mask_MV[torch.from_numpy(rows), torch.tensor(support.token_ids, dtype=torch.int64)] = True
    return mask_MV


def eager_masked_scores(logits_MV: Tensor, target_M: Tensor, mask_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, differentiated by autograd."""
    wide_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    log_softmax_MV = wide_MV.masked_fill(~mask_MV, float("-inf")).log_softmax(-1)
    logprobs_M = log_softmax_MV.gather(1, target_M.long()[:, None]).squeeze(1)
    finite_MV = log_softmax_MV.masked_fill(~mask_MV, 0.0)
    return logprobs_M, -(log_softmax_MV.exp() * finite_MV).sum(-1)


def run(case: Case, score: Any) -> Outcome:
    hidden_MC, weight_VC = (x.detach().clone().requires_grad_() for x in (case.hidden_MC, case.weight_VC))
    bias_V = None if case.bias_V is None else case.bias_V.detach().clone().requires_grad_()
    logprobs_M, entropy_M = score(hidden_MC, weight_VC, bias_V)
    (case.loss_weights_2M[0] * logprobs_M + case.loss_weights_2M[1] * entropy_M).sum().backward()
    assert hidden_MC.grad is not None and weight_VC.grad is not None
    grad_V = None if bias_V is None else bias_V.grad
    return Outcome(logprobs_M.detach(), entropy_M.detach(), hidden_MC.grad, weight_VC.grad, grad_V)


def run_eager(case: Case, support: SampledSupport) -> Outcome:
    mask_MV = kept_mask(support, case.weight_VC.shape[0]).to(case.hidden_MC.device)
    return run(case, lambda h, w, b: eager_masked_scores(eager_logits(h, w, b, **case.options), case.target_M, mask_MV))


def run_support(case: Case, support: SampledSupport, piece_pairs: int | None = None) -> Outcome:
    """With pieces of so many pairs, or tiles of 3 rows and so many columns; or the usual ones."""
    with pytest.MonkeyPatch.context() as patch:
        if piece_pairs is not None:
            itemsize = max(4, case.hidden_MC.dtype.itemsize)
            patch.setattr(kept_pairs, "CPU_PIECE_BYTES", piece_pairs * itemsize * case.hidden_MC.shape[1])
            patch.setattr(tiling, "CPU_TILE_ROWS", 3)
            patch.setattr(tiling, "CPU_TILE_BYTES", 3 * piece_pairs * itemsize)
            patch.setattr(tiling, "MIN_TILE_COLUMNS", 1)
        return run(case, lambda h, w, b: support_logprob(h, w, case.target_M, support, bias=b, **case.options))
