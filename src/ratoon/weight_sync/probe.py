"""After weights were sent: does the engine score a few tokens as the trainer does?

Both score the same fixed tokens, once for each version. Rounding of two implementations leaves a gap that stays about
as it is; weights that did not arrive, or arrived in a wrong place, show as a gap of another size. The tokens are those
of an ordinary text: unlikely ones have large negative logits, whose rounding in 16 bits would hide more.
"""

# Shape letters: M scored tokens.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ratoon.weight_sync.naming import WeightSyncError

_TEXT = (
    "Question: what is the sum of 17 and 25? Let us think about it step by step. 17 + 25 = 42, so the answer is 42. "
    "The capital of France is Paris, and water boils at 100 degrees."
)
_MOST_TOKENS = 64
_FEWEST_TOKENS = 16
_SEED = 20_240_229


def probe_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> NDArray[np.int64]:
    """[16 to 64] int64 in [0, vocab_size): the same for every version, all but the first of which are scored.

    vocab_size: token ids that the model has. Where the tokenizer finds too few tokens in a text, they are arbitrary.
    """
    found = tokenizer.encode(_TEXT, add_special_tokens=False)[:_MOST_TOKENS]
    if len(found) < _FEWEST_TOKENS or max(found) >= vocab_size:
        return np.random.default_rng(_SEED).integers(0, vocab_size, _FEWEST_TOKENS)
    return np.array(found, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ProbeScores:
    """The log-probs of the probe's tokens but the first, under one version of the weights, at temperature 1."""

    version: int
    logprobs_M: NDArray[np.float64]
    """[M] nats."""


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """How far the engine's scores are from the trainer's."""

    version: int
    mean_abs: float
    """Nats, over the M tokens."""

    max_abs: float

    @classmethod
    def between(cls, engine: ProbeScores, trainer: ProbeScores) -> "ProbeGap":
        assert engine.logprobs_M.shape == trainer.logprobs_M.shape, "both score the same tokens"
        gap_M = np.abs(engine.logprobs_M - trainer.logprobs_M)
        return cls(trainer.version, float(gap_M.mean()), float(gap_M.max()))


class WeightProbe:
    """Compares each version's scores, and remembers the trainer's last ones to say what the engine serves instead."""

    def __init__(self, engine: str, *, max_mean_abs: float, limit_key: str) -> None:
        """engine: its name, for the message. max_mean_abs: nats; a larger mean gap stops the run. limit_key: the
        recipe's key that sets it."""
        self._engine = engine
        self._max_mean_abs = max_mean_abs
        self._limit_key = limit_key
        self._before: ProbeScores | None = None

    def check(self, engine: ProbeScores, trainer: ProbeScores) -> ProbeGap:
        """The gap. Raises WeightSyncError where it is over the limit, or not a number, with what that looks like."""
        gap = ProbeGap.between(engine, trainer)
        before, self._before = self._before, trainer
        if gap.mean_abs <= self._max_mean_abs:  # false for NaN
            return gap
        raise WeightSyncError(
            f"after the weights of version {trainer.version} were sent, {self._engine} scores {gap_size(gap)} away "
            f"from the trainer on {trainer.logprobs_M.size} fixed tokens, over {self._limit_key}="
            f"{self._max_mean_abs:g}: {_likeness(engine, trainer, before, self._max_mean_abs)}. The run stops here "
            "rather than learn from another policy's samples"
        )


def gap_size(gap: ProbeGap) -> str:
    """The mean and the largest difference, in words."""
    return f"{gap.mean_abs:.3g} nats on average (at most {gap.max_abs:.3g})"


def _likeness(engine: ProbeScores, trainer: ProbeScores, before: ProbeScores | None, limit: float) -> str:
    """What the engine's scores look like."""
    if not np.isfinite(engine.logprobs_M).all():
        return "its log-probs are not finite, so weights arrived broken, or in memory that is not theirs"
    if not np.isfinite(trainer.logprobs_M).all():
        return "the trainer's own log-probs are not finite, so the last update broke the policy"
    if before is not None:
        old = ProbeGap.between(engine, before)
        if old.mean_abs <= limit:
            return (
                f"they are {gap_size(old)} away from version {before.version}, so the engine still serves those "
                "weights and none of the new ones arrived"
            )
    return (
        "some weights did not arrive, or not where they belong (look at tied or fused weights first), or the engine "
        "computes this model otherwise than transformers does"
    )
