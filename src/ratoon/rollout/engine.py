"""The protocol between the training loop and whatever generates responses."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ratoon.types.rollouts import Prompt, RolloutGroup
from ratoon.types.sampling import SamplingParams


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates groups of responses. Every method must be called from one event loop at a time."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that draw the next token."""
        ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        begun: RolloutGroup | None = None,
        max_new_tokens: int | None = None,
    ) -> RolloutGroup:
        """Draw `group_size` responses; calls that run at the same time share batches.

        begun: what an earlier call gave for the prompt, with the `sampling` and the `step` of that call. Its responses
        that ended are returned as they are; those that `can_go_on` do so from their last token, under the weights of
        now: of every token the version, log-prob, support and routed experts are those of the time it was drawn.
        max_new_tokens: a response that this call gave so many tokens and that has not ended comes back with
        `FinishReason.BUDGET`. Each response is counted by itself, and only the tokens of this call.

        Consumes a prompt. Waits for room in the engine, for `resume` while paused, and for the last of its
        responses. Unblocked by the responses' ends, by `abort` and `close` (with what there is), or by an error.

        Every draw depends on `sampling.seed`, `step`, `prompt.id`, the response's index in the group and the token's
        position in the response, and on nothing else: not on the batch, the order of calls or any global generator.
        So under unchanged weights a response that was stopped and goes on is the one that was never stopped. Two calls
        that agree in all of them draw alike, so prompt ids should differ within a step.

        `rollout_logprobs` are those of the distribution that was drawn from: temperature-scaled, and renormalised over
        the tokens that `sampling` keeps, which `support` names where it leaves any out. Greedy responses (temperature
        0) have neither. `policy_versions` stamps each token. `text` is the response decoded without special tokens, up
        to and including the stop string where one ended it.

        Raises `ValueError` for a `begun` that is not of this call (`check_begun`) and a `max_new_tokens` below 1,
        `UserError` for a prompt the model or the cache cannot hold and for supports over `rollout.max_support_mib`,
        `RolloutStalledError` when no token appears for `rollout.timeout_s`, `RolloutError` for any other failure.
        Cancelling the call withdraws its responses.
        """
        ...

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Serve `weights` from now on, stamped `version`; responses in flight go on with them.

        Consumes a state dict. Waits for the forward pass in progress. Unblocked when the next token will be drawn from
        the new weights. An engine that shares the trainer's tensors ignores `weights`; then pause it while the
        optimizer writes, or write while nothing is in flight.
        """
        ...

    async def pause(self) -> None:
        """Draw no token until `resume`; responses in flight are kept, with their token budgets.

        Waits for the forward pass in progress. Unblocked when the model is no longer in use.
        """
        ...

    async def resume(self) -> None:
        """Undo `pause`. Waits for nothing."""
        ...

    async def abort(self) -> None:
        """End every response in flight with the tokens it has and `FinishReason.ABORT`.

        Waits for the forward pass in progress. Unblocked when all pending `generate` calls have their groups. The
        engine goes on to serve new calls.
        """
        ...

    async def close(self) -> None:
        """Abort, and free threads and cache; a second call does nothing.

        Waits for the forward pass in progress, at most `rollout.timeout_s`. Later calls raise `RolloutError`.
        """
        ...
