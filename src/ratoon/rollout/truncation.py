"""Draws among the likeliest tokens: top-k, top-p and min-p, with the set that each token was drawn among.

`SamplingParams` says which tokens are kept. With equals ranked by token id, each of the three keeps a prefix of the
ranking, so all three together keep the shortest of them (top-p's measured against the total of top-k's). How long it is
follows from the sorted logits alone; ids matter only where equals stand on both sides of its end. The largest logits
are taken a few at a time: a vocabulary is sorted only where its distribution is so flat that thousands are kept.
"""

# Shape letters: B responses of one forward pass, V vocabulary, K ranks.

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.types import SamplingParams

FIRST_RANKS = 128
"""Ranks looked at first where top-k sets none: more than most rows need, few enough that a partial sort is cheap."""

_RANKS_GROWTH = 8

_MORE_RANKS = 64
"""Looked at beyond those that may be kept: so many equals of the last one (bf16 logits have them) are at hand."""

_WIDE = 4096
"""More kept tokens than this are picked out of the vocabulary by their logits, fewer out of the ranks."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """One temperature and what leaves tokens out; responses that agree in it are drawn together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> "Truncation | None":
        """None where every token may be drawn, and for greedy sampling, which draws none."""
        if sampling.temperature == 0 or not sampling.is_truncated:
            return None
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


@dataclass(frozen=True, slots=True)
class KeptDraws:
    """One drawn token a row, and what it was drawn among."""

    token_B: Tensor
    """[B] int64."""

    logprob_B: Tensor
    """[B] float32: log-softmax of logits / temperature over the kept tokens; not finite where the logits are not."""

    kept: list[NDArray[np.int32]]
    """B arrays of kept token ids, ascending."""


def sample_kept_tokens(logits_BV: Tensor, truncation: Truncation, uniform_B: Tensor) -> KeptDraws:
    """Draw one token a row among its kept tokens, by the inverse of their cumulative distribution in order of id.

    logits_BV: [B, V] float32. uniform_B: [B] float64 in (0, 1).

    With every token kept this draws what `sample_tokens` draws. All sums are float64.
    """
    B, V = logits_BV.shape
    most_ranks = min(truncation.top_k or V, V)
    num_ranks = most_ranks if truncation.top_k else min(FIRST_RANKS, V)
    total_B = _totals(logits_BV, truncation)
    token_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    kept: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * B
    left_B = torch.arange(B, device=logits_BV.device)
    while left_B.numel():
        left_BV = logits_BV if left_B.numel() == B else logits_BV[left_B]
        ranked = _Ranked(*left_BV.topk(min(num_ranks + _MORE_RANKS, V), dim=1))
        num_kept_B = _num_kept(ranked.logit_BK[:, :num_ranks], None if total_B is None else total_B[left_B], truncation)
        is_found_B = (num_kept_B < num_ranks) | (num_ranks == most_ranks)
        found_B = left_B[is_found_B]
        if found_B.numel():
            num_kept_B = num_kept_B[is_found_B]
            found_BV = left_BV if found_B.numel() == left_B.numel() else left_BV[is_found_B]
            id_BK = _kept_ids(found_BV, ranked.rows(is_found_B), num_kept_B)
            scaled_BK = _scaled(found_BV.gather(1, id_BK), ranked.logit_BK[is_found_B, :1], truncation)
            is_kept_BK = _is_before(num_kept_B, id_BK.shape[1])
            place_B1, logprob_B1 = _draw(scaled_BK.masked_fill_(~is_kept_BK, -torch.inf), uniform_B[found_B])
            token_B[found_B], logprob_B[found_B] = id_BK.gather(1, place_B1)[:, 0], logprob_B1[:, 0].float()
            flat = id_BK[is_kept_BK].to(torch.int32).cpu().numpy()
            ends = np.cumsum(num_kept_B.cpu().numpy())[:-1]
            for row, ids in zip(found_B.tolist(), np.split(flat, ends), strict=True):
                kept[row] = ids
        left_B = left_B[~is_found_B]
        num_ranks = min(num_ranks * _RANKS_GROWTH, most_ranks)
    return KeptDraws(token_B, logprob_B, kept)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The largest logits of each row."""

    logit_BK: Tensor
    """[B, K] float32, falling."""

    id_BK: Tensor
    """[B, K] int64; equals in any order."""

    def rows(self, is_wanted_B: Tensor) -> "_Ranked":
        return _Ranked(self.logit_BK[is_wanted_B], self.id_BK[is_wanted_B])


def _scaled(logits_BK: Tensor, largest_B1: Tensor, truncation: Truncation) -> Tensor:
    """(logit - the row's largest) / temperature in float64."""
    return (logits_BK.double() - largest_B1.double()).div_(truncation.temperature)


def _is_before(end_B: Tensor, width: int) -> Tensor:
    """[B, width] bool: true in the first `end` columns of each row."""
    return torch.arange(width, device=end_B.device) < end_B[:, None]


def _totals(logits_BV: Tensor, truncation: Truncation) -> Tensor | None:
    """[B] float64, what top-p's part is measured against: sum of exp(scaled) over V. None where the ranks suffice."""
    if truncation.top_p == 1 or truncation.top_k:
        return None
    return _scaled(logits_BV, logits_BV.amax(dim=1, keepdim=True), truncation).exp_().sum(dim=1)


def _num_kept(logit_BK: Tensor, total_B: Tensor | None, truncation: Truncation) -> Tensor:
    """[B] int64: how many of the ranked tokens are kept, at least 1."""
    weight_BK = _scaled(logit_BK, logit_BK[:, :1], truncation).exp_()
    # A token whose chance rounds to nothing cannot be drawn, so it is not recorded either.
    is_kept_BK = weight_BK > 0
    if truncation.min_p:
        is_kept_BK &= weight_BK >= truncation.min_p
    if truncation.top_p < 1:
        cumulative_BK = weight_BK.cumsum(dim=1)
        total_B1 = (cumulative_BK[:, -1] if total_B is None else total_B)[:, None]
        # A token stays while those before it fall short.
        is_kept_BK[:, 1:] &= cumulative_BK[:, :-1] < truncation.top_p * total_B1
    is_kept_BK[:, 0] = True
    return is_kept_BK.sum(dim=1)


def _kept_ids(logits_BV: Tensor, ranked: _Ranked, num_kept_B: Tensor) -> Tensor:
    """[B, most of a row] int64: the kept ids in ascending order, then any ids of the vocabulary.

    Kept are all above the last one's logit and, of its equals, those with the lowest ids.
    """
    width, V = int(num_kept_B.max()), logits_BV.shape[1]
    last_logit_B1 = ranked.logit_BK.gather(1, num_kept_B[:, None] - 1)
    may_equal_more_B = (ranked.logit_BK[:, -1:] == last_logit_B1)[:, 0] & (ranked.logit_BK.shape[1] < V)
    is_wide_B = may_equal_more_B | (num_kept_B > _WIDE)
    if bool(is_wide_B.all()):
        id_BK = ranked.id_BK[:, :width].clone()
    else:
        is_above_BK, is_equal_BK = ranked.logit_BK > last_logit_B1, ranked.logit_BK == last_logit_B1
        num_equal_B1 = num_kept_B[:, None] - is_above_BK.sum(dim=1, keepdim=True)
        equal_id_BK = ranked.id_BK.masked_fill(~is_equal_BK, V).sort(dim=1).values
        is_equal_BK &= ranked.id_BK <= equal_id_BK.gather(1, num_equal_B1 - 1)
        id_BK = ranked.id_BK.masked_fill(~(is_above_BK | is_equal_BK), V).sort(dim=1).values
        id_BK = id_BK[:, :width].clamp(max=V - 1)
    if bool(is_wide_B.any()):
        wide_BV, last_B1 = logits_BV[is_wide_B], last_logit_B1[is_wide_B]
        is_kept_BV, is_equal_BV = wide_BV > last_B1, wide_BV == last_B1
        num_equal_B1 = num_kept_B[is_wide_B, None] - is_kept_BV.sum(dim=1, keepdim=True)
        is_kept_BV |= is_equal_BV & (is_equal_BV.cumsum(dim=1, dtype=torch.int32) <= num_equal_B1)
        wide_BK = id_BK[is_wide_B]
        wide_BK[_is_before(num_kept_B[is_wide_B], width)] = is_kept_BV.nonzero()[:, 1]
        id_BK[is_wide_B] = wide_BK
    return id_BK


def _draw(scaled_BK: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The drawn column [B, 1] and its log-prob [B, 1] float64; columns at -inf are never drawn."""
    cumulative_BK = scaled_BK.exp().cumsum_(dim=1)
    total_B1 = cumulative_BK[:, -1:]
    place_B1 = torch.searchsorted(cumulative_BK, uniform_B[:, None] * total_B1, right=True)
    # Logits that are not finite leave a threshold that no sum exceeds.
    place_B1.clamp_(max=scaled_BK.shape[1] - 1)
    return place_B1, scaled_BK.gather(1, place_B1) - total_B1.log()
