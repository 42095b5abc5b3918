"""Updates of the policy from planned groups: forward, loss, backward, optimizer."""

# Shape letters: M scored tokens of one microbatch, N responses of one group.

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.algorithms.config import AlgorithmConfig, LossMean
from ratoon.algorithms.kl import kl_estimates
from ratoon.algorithms.losses import supervised_loss
from ratoon.algorithms.objective import ScoredTokens, microbatch_objective
from ratoon.algorithms.sequences import sequence_sums
from ratoon.attention.transfer import to_device
from ratoon.distributed import DataParallel, SequenceGroup, is_sharded
from ratoon.layout import PackedLayout
from ratoon.models import KeptPrompt, forward_logprobs, has_adapters, model_shape, sequence_group_of
from ratoon.planner import useful_flops
from ratoon.trainer.microbatch import Microbatch, Update, build_microbatch
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.trainer.reference import ReferenceScore
from ratoon.trainer.step_result import StepResult, StepTotals

Stretch = tuple[Microbatch, ...]
"""One microbatch, or several of one group that go on from one pass of its prompt (`StepPlan.kept_runs`)."""


class Trainer:
    """Owns the model's optimizer. Every rank calls every method with the same updates.

    Updates are planned for `sequence_group.num_data_ranks` ranks: those that hold each microbatch of the model together
    (`set_sequence_parallel`, before) are one of them.

    reference: scores the model that a KL penalty keeps the policy near; needed where `algorithm.needs_reference`.
    max_response_tokens: the run's limit, which `algorithm.loss_mean` "constant" divides by.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        *,
        algorithm: AlgorithmConfig,
        temperature: float,
        max_grad_norm: float,
        data_parallel: DataParallel,
        reference: ReferenceScore | None = None,
        max_response_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.algorithm = algorithm
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.data_parallel = data_parallel
        self.sequence_group = sequence_group_of(model) or SequenceGroup(
            rank=0, size=1, data_rank=data_parallel.rank, num_data_ranks=data_parallel.world_size
        )
        self.reference = reference
        self.max_response_tokens = max_response_tokens
        self.shape = model_shape(model.config)
        self.trains_weights = not has_adapters(model)
        self.device = next(model.parameters()).device

    def step(self, updates: Sequence[Update], *, learning_rate: float) -> StepResult:
        """One optimizer update for each of `updates`, against the policy as it was before the first.

        Raises FloatingPointError, with the weights of the last good update, where a gradient is not finite;
        ValueError where the algorithm corrects for the engine's log-probs and a response has none.
        """
        started = time.perf_counter()
        self._check(updates)
        self._begin()
        batches = [self._stretches(update, self.algorithm.loss_mean) for update in updates]
        if len(updates) > 1:  # otherwise the old policy is the current one and costs no pass
            batches = [[self._with_old_logprobs(stretch) for stretch in stretches] for stretches in batches]
        totals = StepTotals.zeros(self.device)
        grad_norms: list[float] = []
        for stretches in batches:
            for stretch in stretches:
                self._backward_stretch(stretch, totals)
            grad_norms.append(self._apply(learning_rate))
        if not self.sequence_group.is_first:
            totals.forget()
        return totals.result(
            self.data_parallel,
            self.algorithm,
            grad_norms=grad_norms,
            learning_rate=learning_rate,
            num_microbatches=sum(update.plan.num_microbatches for update in updates),
            update_s=time.perf_counter() - started,
        )

    def supervised_step(self, update: Update, *, learning_rate: float) -> float:
        """One update of cross-entropy on the responses' tokens. Returns nats per token before it."""
        self._begin()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        assert not any(update.plan.kept_runs), "the supervised stage has one response a prompt, and keeps none"
        for (batch,) in self._stretches(update, "token"):
            if batch.layout.num_scored == 0:
                self._stand_by(batch)
                continue
            logprobs_M, _ = forward_logprobs(self.model, batch.layout)
            microbatch_loss = supervised_loss(logprobs_M, _like(batch.loss_weights_M, logprobs_M))
            microbatch_loss.backward()
            self.optimizer.accumulate()
            loss += microbatch_loss.detach()
        self._apply(learning_rate)
        counted = loss.item() if self.sequence_group.is_first else 0.0
        return self.data_parallel.all_reduce_sums({"loss": counted})["loss"]

    @torch.no_grad()
    def kl_to_reference(self, update: Update) -> tuple[NDArray[np.float64], ...]:
        """For each group of the update [N] nats: `algorithm.kl_estimator` summed over each response's tokens.

        For a KL penalty in the reward (RLOO, arXiv 2402.14740; REINFORCE++, arXiv 2501.03262), before advantages
        are computed: the groups need neither rewards nor advantages. Under the current policy, without dropout, as it
        drew the responses. The same on every rank, whichever scored a response; a response without tokens has 0.
        """
        was_training = self.model.training
        self.model.eval()
        found = [np.zeros(group.group_size) for group in update.groups]
        for parts in update.plan.assignment[self._data_rank(update)]:
            sequences = [(group, response) for group, chosen in parts for response in chosen]
            batch = build_microbatch(update, parts, loss_mean="token")
            for (group, response), kl in zip(sequences, self._kl_of_sequences(batch), strict=True):
                found[group][response] = kl if self.sequence_group.is_first else 0.0
        self.model.train(was_training)
        named = {f"{group}/{index}": kl for group, kl_N in enumerate(found) for index, kl in enumerate(kl_N.tolist())}
        summed = self.data_parallel.all_reduce_sums(named)  # each stands on one rank; the others hold 0
        return tuple(
            np.array([summed[f"{group}/{index}"] for index in range(kl_N.size)]) for group, kl_N in enumerate(found)
        )

    def _kl_of_sequences(self, batch: Microbatch) -> list[float]:
        assert self.algorithm.kl_estimator is not None, "there is no KL penalty to compute"
        if batch.layout.num_scored == 0 and not is_sharded(self.model):
            return [0.0] * batch.layout.num_sequences
        ref_logprobs_M = self._reference_logprobs(batch)
        logprobs_M, _ = forward_logprobs(self.model, batch.layout, self.temperature, support=batch.support)
        kl_M = kl_estimates(logprobs_M, ref_logprobs_M, estimator=self.algorithm.kl_estimator)
        every_M = torch.ones_like(kl_M, dtype=torch.bool)
        sequence_of_M = to_device(batch.layout.sequence_of_M, kl_M.device)
        return sequence_sums(kl_M, every_M, sequence_of_M, num_sequences=batch.layout.num_sequences).tolist()

    def _check(self, updates: Sequence[Update]) -> None:
        """What a step needs, on every rank alike, so that none waits for one that has stopped."""
        if not self.algorithm.needs_rollout_logprobs:
            return
        responses = [response for update in updates for group in update.groups for response in group.responses]
        silent = sum(response.rollout_logprobs is None and response.num_tokens > 0 for response in responses)
        if silent:
            raise ValueError(
                f"algorithm.mismatch_correction = {self.algorithm.mismatch_correction!r} weighs tokens by the rollout "
                f"engine's log-probs, but {silent} of {len(responses)} responses came without; take an engine that "
                "reports them, or set it to 'none'"
            )

    def _begin(self) -> None:
        """Training mode, and no gradient that a failed step or somebody else's backward has left."""
        self.model.train()
        self.optimizer.clear()

    def _stretches(self, update: Update, loss_mean: LossMean) -> list[Stretch]:
        rank = self._data_rank(update)
        batches = [
            build_microbatch(update, parts, loss_mean=loss_mean, max_response_tokens=self.max_response_tokens)
            for parts in update.plan.assignment[rank]
        ]
        bounds = dict(update.plan.kept_runs[rank])
        stretches: list[Stretch] = []
        while (start := sum(map(len, stretches))) < len(batches):
            stretches.append(tuple(batches[start : bounds.get(start, start + 1)]))
        return stretches

    def _data_rank(self, update: Update) -> int:
        """Whose microbatches of the plan this rank computes, by itself or with others."""
        group = self.sequence_group
        assert update.plan.num_ranks == group.num_data_ranks, (
            f"an update planned for {update.plan.num_ranks} ranks, where {group.num_data_ranks} have microbatches"
        )
        return group.data_rank

    def _keep_prompt(self, stretch: Stretch) -> KeptPrompt | None:
        """The pass of the prompt that several microbatches go on from."""
        return KeptPrompt.keep(self.model, stretch[0].prompt_layout.token_ids_T) if len(stretch) > 1 else None

    @torch.no_grad()
    def _with_old_logprobs(self, stretch: Stretch) -> Stretch:
        kept = self._keep_prompt(stretch)
        return tuple(replace(batch, old_logprobs_M=self._logprobs(batch, kept)[0]) for batch in stretch)

    def _logprobs(self, batch: Microbatch, kept: KeptPrompt | None) -> tuple[Tensor, Tensor]:
        return forward_logprobs(self.model, batch.layout, self.temperature, support=batch.support, kept=kept)

    def _reference_logprobs(self, batch: Microbatch) -> Tensor:
        assert self.reference is not None, "a KL penalty needs a reference model"
        return self.reference(batch.layout, batch.support)

    def _backward_stretch(self, stretch: Stretch, totals: StepTotals) -> None:
        """Adds the gradient of one microbatch, or of several whose prompt goes forward and backward once."""
        if self.algorithm.kl_in == "loss":
            # Before the policy's first pass: the reference may be the same model in another state, and the graph of a
            # kept prompt must find the weights as it left them.
            stretch = tuple(replace(batch, ref_logprobs_M=self._reference_logprobs(batch)) for batch in stretch)
        kept = self._keep_prompt(stretch)
        for batch in stretch:
            self._backward(batch, totals, kept)
            if kept is not None:
                kept.add_gradients()
        if kept is not None:
            kept.backward()
            self.optimizer.accumulate()
            num_counted = sum(batch.layout.num_scored > 0 for batch in stretch)
            totals.leave_out_prompts(num_counted - 1, kept.num_rows, self._flops(stretch[0].prompt_layout))

    def _backward(self, batch: Microbatch, totals: StepTotals, kept: KeptPrompt | None = None) -> None:
        """Adds the microbatch's gradient. One without scored tokens has none."""
        if batch.layout.num_scored == 0:
            self._stand_by(batch)
            return
        assert batch.advantages_M is not None, "groups need advantages before a policy update"
        logprobs_M, entropy_M = self._logprobs(batch, kept)
        rollout_logprobs_M = batch.rollout_logprobs_M
        tokens = ScoredTokens(
            policy_logprobs_M=logprobs_M,
            entropy_M=entropy_M,
            old_logprobs_M=logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M,
            advantages_M=_like(batch.advantages_M, logprobs_M),
            loss_weights_M=_like(batch.loss_weights_M, logprobs_M),
            sequence_of_M=to_device(batch.layout.sequence_of_M, logprobs_M.device),
            num_sequences=batch.layout.num_sequences,
            rollout_logprobs_M=None if rollout_logprobs_M is None else _like(rollout_logprobs_M, logprobs_M),
            ref_logprobs_M=batch.ref_logprobs_M,
        )
        result = microbatch_objective(self.algorithm, tokens)
        result.loss.backward()
        self.optimizer.accumulate()
        totals.add(batch.layout, self._flops(batch.layout), result, entropy_M)

    def _flops(self, layout: PackedLayout) -> float:
        return useful_flops(self.shape, layout, trains_weights=self.trains_weights)

    def _stand_by(self, idle: Microbatch) -> None:
        """Has nothing to score, and takes part where the other ranks' passes wait for this one's."""
        if is_sharded(self.model):
            logprobs_M, entropy_M = forward_logprobs(self.model, idle.layout)
            (logprobs_M.sum() + entropy_M.sum()).backward()

    def _apply(self, learning_rate: float) -> float:
        if not is_sharded(self.model):  # there the backward passes have summed them
            self.data_parallel.all_reduce_gradients(self.optimizer.masters)
        return self.optimizer.step(learning_rate=learning_rate, max_grad_norm=self.max_grad_norm)


def _like(values_M: Tensor, other: Tensor) -> Tensor:
    return to_device(values_M, other.device, other.dtype)
