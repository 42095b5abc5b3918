"""Before a checkpoint is written: is the policy one that a run can go on from?"""

# Shape letters: M scored tokens.

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ratoon.distributed import DataParallel, on_each
from ratoon.layout import pack_documents
from ratoon.models import forward_logprobs
from ratoon.models.compiled import layers_as_written
from ratoon.models.self_check import checked_sequences, evaluation
from ratoon.models.soundness import describe_spoilt, spoilt_weights
from ratoon.rollout.errors import NonFiniteLogitsError
from ratoon.trainer.checkpoint import checkpoint_step
from ratoon.types.errors import first_cause
from ratoon.types.rollouts import Prompt

_MOST_PROMPTS = 64
_MOST_ROWS = 512
"""Of all of them: a policy that overflows may do so for some tokens alone."""


class SpoiltPolicyError(RuntimeError):
    """The updates of a run have left weights or logits that are not finite."""


class Soundness:
    """Whether the policy is made of finite numbers and gives some. All ranks ask together, and hear the same."""

    def __init__(
        self,
        model: PreTrainedModel,
        sampled: PreTrainedModel,
        prompts: Sequence[Prompt],
        eos_token_id: int,
        ranks: DataParallel,
    ) -> None:
        """sampled: `model`, or its whole copy, which has the weights of now. prompts: some of them are scored."""
        self._model = model
        self._sampled = sampled
        # With what a resumed run's model is checked on: what is saved here must pass there.
        self._layout = pack_documents([*_spread_over(prompts, eos_token_id), *checked_sequences(model)])
        self._ranks = ranks

    def require(self, step: int, *, newest: Path | None) -> None:
        """Raises SpoiltPolicyError where the weights after `step` are not finite, or a short forward pass is not.

        newest: the checkpoint that stays. Reads each weight once; no random number is drawn.
        """

        def check_weights() -> None:
            names = spoilt_weights(self._sampled.named_parameters())
            if names:
                raise _spoilt(step, f"has {describe_spoilt(names)}; {_not_saved(newest)}")

        on_each(self._ranks, "check of the weights", check_weights)
        are_finite = self._are_logprobs_finite()  # where the model is cut, a pass of all ranks together

        def check_logits() -> None:
            if not are_finite:
                what = f"has finite weights, and logits that are not: it overflows in {self._model.dtype}"
                raise _spoilt(step, f"{what}; {_not_saved(newest)}")

        on_each(self._ranks, "check of the logits", check_logits)

    def require_innocent(self, error: Exception, step: int, *, newest: Path | None) -> None:
        """Raises SpoiltPolicyError where what failed, on any rank, is the policy: nothing could be drawn from it."""
        is_policys = isinstance(first_cause(error), NonFiniteLogitsError)
        if not self._ranks.all_reduce_maxima({"spoilt": float(is_policys)})["spoilt"]:
            return
        if newest is None or checkpoint_step(newest) != step:
            raise _spoilt(step, f"is what failed; {_not_saved(newest)}")
        raise _spoilt(
            step, f"is what failed, and {newest} holds it: remove that folder to go on from the checkpoint before it"
        )

    @torch.no_grad()
    def _are_logprobs_finite(self) -> bool:
        with evaluation(self._model), layers_as_written(self._model):
            logprobs_M, _ = forward_logprobs(self._model, self._layout)
        return bool(logprobs_M.isfinite().all())


def _spread_over(prompts: Sequence[Prompt], eos_token_id: int) -> list[NDArray[np.int64]]:
    """Some from all over the data, each ended, so that one of a single token scores something too."""
    chosen: list[NDArray[np.int64]] = []
    num_left = _MOST_ROWS
    for prompt in prompts[:: -(-len(prompts) // _MOST_PROMPTS)]:
        chosen.append(np.append(prompt.token_ids[: _MOST_ROWS - 1], eos_token_id))
        num_left -= chosen[-1].size
        if num_left <= 0:
            break
    return chosen


def _spoilt(step: int, what: str) -> SpoiltPolicyError:
    return SpoiltPolicyError(
        f"the policy after step {step} {what}. The same recipe comes to the same end: lower trainer.learning_rate, or "
        'take model.dtype = "float32" where 16 bits overflow, and start anew with --fresh'
    )


def _not_saved(newest: Path | None) -> str:
    return "it was not saved" + ("" if newest is None else f", and the last good checkpoint, {newest.name}, stays")
