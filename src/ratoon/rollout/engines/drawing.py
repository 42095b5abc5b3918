"""One token for each response of a forward pass, from its own stream of draws."""

# Shape letters: B responses of one forward pass, b: those of one distribution, V vocabulary.

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ratoon.rollout.drafts import ResponseDraft
from ratoon.rollout.draws import sample_tokens, uniform_draws
from ratoon.rollout.errors import NonFiniteLogitsError
from ratoon.rollout.truncation import Truncation, sample_kept_tokens

TokenScore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [B, V], tokens [B] and temperatures [B] to log-probs [B] float32."""


def draw_tokens(
    drafts: Sequence[ResponseDraft], logits_BV: Tensor, score: TokenScore | None = None
) -> tuple[Tensor, Tensor]:
    """The next token of each draft: [B] int64, with its log-prob [B] float32.

    logits_BV: [B, V] float32, B at least 1. Drafts are told what their token was drawn among; they have not taken it
    yet. score: gives the log-probs of tokens drawn from the whole vocabulary. Raises NonFiniteLogitsError where logits
    are not finite, UserError where what a token was drawn among does not fit.
    """
    token_B, logprob_B = _draw(drafts, logits_BV, score)
    check_finite(bool(torch.isfinite(logprob_B).all()))
    return token_B, logprob_B


def check_finite(are_finite: bool) -> None:
    """Raises NonFiniteLogitsError where the log-probs of drawn tokens are not."""
    if not are_finite:
        raise NonFiniteLogitsError(
            "the model's logits are not finite, so no token can be drawn; the weights hold NaN or infinity, "
            "or overflow in this dtype: look at the gradient norm of the last steps"
        )


def _draw(drafts: Sequence[ResponseDraft], logits_BV: Tensor, score: TokenScore | None) -> tuple[Tensor, Tensor]:
    device = logits_BV.device
    keys_B = np.array([draft.key for draft in drafts], np.uint64)
    positions_B = np.array([len(draft.token_ids) for draft in drafts], np.int64)
    uniform_B = torch.from_numpy(uniform_draws(keys_B, positions_B)).to(device)
    rows_of: dict[Truncation | None, list[int]] = {}
    for row, draft in enumerate(drafts):
        rows_of.setdefault(draft.truncation, []).append(row)
    token_B = torch.empty(len(drafts), dtype=torch.int64, device=device)
    logprob_B = torch.empty(len(drafts), dtype=torch.float32, device=device)
    for truncation, rows in rows_of.items():
        is_all = len(rows) == len(drafts)
        index_b = slice(None) if is_all else torch.tensor(rows, device=device)
        if truncation is None:
            temperatures = [drafts[row].temperature for row in rows]
            temperature_b = torch.tensor(temperatures, dtype=torch.float64, device=device)
            token_b, logprob_b = sample_tokens(logits_BV[index_b], temperature_b, uniform_B[index_b])
            token_B[index_b] = token_b
            logprob_B[index_b] = logprob_b if score is None else score(logits_BV[index_b], token_b, temperature_b)
            continue
        drawn = sample_kept_tokens(logits_BV[index_b], truncation, uniform_B[index_b])
        token_B[index_b], logprob_B[index_b] = drawn.token_B, drawn.logprob_B
        for row, kept in zip(rows, drawn.kept, strict=True):
            drafts[row].draw_among(kept)
    return token_B, logprob_B
