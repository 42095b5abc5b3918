"""Updates of the policy from planned groups: forward, loss, backward, optimizer."""

# Shape letters: M scored tokens of one microbatch.

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.algorithms.losses import clipped_policy_loss, entropy_bonus, supervised_loss
from ratoon.distributed import DataParallel
from ratoon.models import forward_logprobs, model_shape
from ratoon.trainer.microbatch import LossMean, Microbatch, Update, build_microbatch
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.trainer.step_result import StepResult, StepTotals


class Trainer:
    """Owns the model's optimizer. Every rank calls every method with the same updates."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        *,
        algorithm: AlgorithmConfig,
        temperature: float,
        max_grad_norm: float,
        data_parallel: DataParallel,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.algorithm = algorithm
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.data_parallel = data_parallel
        self.shape = model_shape(model.config)
        self.device = next(model.parameters()).device

    def step(self, updates: Sequence[Update], *, learning_rate: float) -> StepResult:
        """One optimizer update for each of `updates`, against the policy as it was before the first.

        Raises FloatingPointError, with the weights of the last good update, where a gradient is not finite.
        """
        started = time.perf_counter()
        self._begin()
        batches = [self._microbatches(update, self.algorithm.loss_mean) for update in updates]
        if len(updates) > 1:  # otherwise the old policy is the current one and costs no pass
            batches = [[self._with_old_logprobs(batch) for batch in microbatches] for microbatches in batches]
        totals = StepTotals.zeros(self.device)
        grad_norms: list[float] = []
        for microbatches in batches:
            for batch in microbatches:
                self._backward(batch, totals)
            grad_norms.append(self._apply(learning_rate))

        sums = totals.over_ranks(self.data_parallel)
        num_loss_tokens, num_compared = max(sums["num_loss_tokens"], 1.0), sums["num_compared"]
        return StepResult(
            loss=sums["loss"],
            grad_norm=max(grad_norms, default=0.0),
            learning_rate=learning_rate,
            num_updates=len(updates),
            num_microbatches=sum(update.plan.num_microbatches for update in updates),
            num_rows=int(sums["num_rows"]),
            num_logical_tokens=int(sums["num_logical_tokens"]),
            num_loss_tokens=int(sums["num_loss_tokens"]),
            useful_flops=sums["useful_flops"],
            entropy_mean=sums["entropy"] / num_loss_tokens,
            clipped_fraction=sums["num_clipped"] / num_loss_tokens,
            kl_old_mean=sums["kl_old"] / num_loss_tokens,
            ratio_mean=sums["ratio"] / num_loss_tokens,
            mismatch_mean_abs=sums["mismatch"] / num_compared if num_compared else None,
            mismatch_max_abs=sums["mismatch_max"] if num_compared else None,
            update_s=time.perf_counter() - started,
        )

    def supervised_step(self, update: Update, *, learning_rate: float) -> float:
        """One update of cross-entropy on the responses' tokens. Returns nats per token before it."""
        self._begin()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self._microbatches(update, "token"):
            if batch.layout.num_scored == 0:
                continue
            logprobs_M, _ = forward_logprobs(self.model, batch.layout)
            microbatch_loss = supervised_loss(logprobs_M, _like(batch.loss_weights_M, logprobs_M))
            microbatch_loss.backward()
            self.optimizer.accumulate()
            loss += microbatch_loss.detach()
        self._apply(learning_rate)
        return self.data_parallel.all_reduce_sums({"loss": loss.item()})["loss"]

    def _begin(self) -> None:
        """Training mode, and no gradient that a failed step or somebody else's backward has left."""
        self.model.train()
        self.optimizer.clear()

    def _microbatches(self, update: Update, loss_mean: LossMean) -> list[Microbatch]:
        planned = update.plan.assignment[self.data_parallel.rank]
        return [build_microbatch(update, parts, loss_mean=loss_mean) for parts in planned]

    @torch.no_grad()
    def _with_old_logprobs(self, batch: Microbatch) -> Microbatch:
        old_logprobs_M, _ = forward_logprobs(self.model, batch.layout, self.temperature, support=batch.support)
        return replace(batch, old_logprobs_M=old_logprobs_M)

    def _backward(self, batch: Microbatch, totals: StepTotals) -> None:
        """Adds the microbatch's gradient. One without scored tokens has none, and runs no forward pass."""
        if batch.layout.num_scored == 0:
            return
        assert batch.advantages_M is not None, "groups need advantages before a policy update"
        logprobs_M, entropy_M = forward_logprobs(self.model, batch.layout, self.temperature, support=batch.support)
        old_logprobs_M = logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M
        weights_M = _like(batch.loss_weights_M, logprobs_M)
        policy_loss = clipped_policy_loss(
            logprobs_M,
            old_logprobs_M,
            _like(batch.advantages_M, logprobs_M),
            weights_M,
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
        )
        loss = policy_loss.loss
        if self.algorithm.entropy_coefficient:
            loss = loss - self.algorithm.entropy_coefficient * entropy_bonus(entropy_M, weights_M)
        loss.backward()
        self.optimizer.accumulate()
        totals.add_rows(batch.layout, self.shape)
        totals.add_loss(loss, policy_loss, entropy_M)
        if batch.rollout_logprobs_M is not None:
            totals.add_mismatch(old_logprobs_M, _like(batch.rollout_logprobs_M, old_logprobs_M))

    def _apply(self, learning_rate: float) -> float:
        self.data_parallel.all_reduce_gradients(self.optimizer.masters)
        return self.optimizer.step(learning_rate=learning_rate, max_grad_norm=self.max_grad_norm)


def _like(values_M: Tensor, other: Tensor) -> Tensor:
    return values_M.to(device=other.device, dtype=other.dtype)
