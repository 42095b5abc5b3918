"""What a step reports, summed over microbatches and ranks without waiting for the device in between."""

# Shape letters: M scored tokens of one microbatch.

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.algorithms.objective import Objective
from ratoon.distributed import DataParallel
from ratoon.layout.packed_layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Means run over the loss tokens of all its updates, on every rank."""

    loss: float
    """Summed over the updates."""

    grad_norm: float
    """Largest of the updates', before clipping."""

    learning_rate: float
    num_updates: int
    num_microbatches: int
    """Forward passes of one rank that count towards a gradient, the same on every rank."""

    num_rows: int
    """Token rows computed, repeated prompts included."""

    num_logical_tokens: int
    """Token rows that separate sequences would have taken."""

    num_loss_tokens: int
    useful_flops: float
    """Forward and backward of the rows computed; neither recomputation nor old log-probs count."""

    entropy_mean: float
    """Nats per token."""

    clipped_fraction: float
    """Loss tokens that the clip left without gradient; cispo: whose ratio was bounded, with their gradient."""

    kl_old_mean: float
    """Nats per token, estimate k3 of KL(old policy || policy)."""

    ratio_mean: float
    mismatch_mean_abs: float | None
    """Nats. |old_logprobs - rollout_logprobs|, before any correction; None where the engine gave none."""

    mismatch_max_abs: float | None
    update_s: float
    """Forward, backward and optimizer, old and reference log-probs included."""

    kl_ref_mean: float | None = None
    """Nats per token, `algorithm.kl_estimator` of KL(policy || reference). None without a KL term in the loss."""

    mismatch_ratio_mean: float | None = None
    """Trainer's over engine's probability of a token, before any correction. None as for `mismatch_mean_abs`."""

    mismatch_ratio_max: float | None = None
    mismatch_kl_mean: float | None = None
    """Nats per token, estimate k3 of KL(rollout || trainer), before any correction."""

    corrected_fraction: float | None = None
    """Loss tokens whose ratio the mismatch correction cut or masked. None without a correction."""

    correction_mean: float | None = None
    """Mean over loss tokens of what the correction multiplied their loss by."""

    @property
    def dedup_ratio(self) -> float:
        """Measured: logical tokens over rows computed."""
        return self.num_logical_tokens / self.num_rows if self.num_rows else 1.0

    @property
    def logical_tokens_per_s(self) -> float:
        """Each response with its own copy of its prompt, over the update's seconds."""
        return self.num_logical_tokens / self.update_s

    @property
    def computed_tokens_per_s(self) -> float:
        """Rows computed over the update's seconds."""
        return self.num_rows / self.update_s


@dataclass(slots=True, eq=False)
class StepTotals:
    """Running sums of a step; float64 scalars, on the device where they arise."""

    num_rows: Tensor
    num_logical_tokens: Tensor
    useful_flops: Tensor
    loss: Tensor
    num_loss_tokens: Tensor
    num_clipped: Tensor
    ratio: Tensor
    kl_old: Tensor
    kl_ref: Tensor
    entropy: Tensor
    num_compared: Tensor
    mismatch: Tensor
    mismatch_ratio: Tensor
    mismatch_kl: Tensor
    num_corrected: Tensor
    correction: Tensor
    max_mismatch: Tensor
    """A maximum, not a sum, as is the next."""

    max_mismatch_ratio: Tensor

    @classmethod
    def zeros(cls, device: torch.device) -> "StepTotals":
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    @torch.no_grad()
    def add(self, layout: PackedLayout, flops: float, objective: Objective, entropy_M: Tensor) -> None:
        """What one microbatch computed, `flops` of useful work. Every scored token is a loss token."""
        self.num_rows += layout.num_rows
        self.num_logical_tokens += layout.num_logical_tokens
        self.useful_flops += flops
        self.loss += objective.loss
        self.num_loss_tokens += objective.policy.num_loss_tokens
        self.num_clipped += objective.policy.num_clipped_low + objective.policy.num_clipped_high
        self.ratio += objective.policy.sum_ratio
        self.kl_old += objective.policy.sum_kl_k3
        self.entropy += entropy_M.sum()
        if objective.kl is not None:
            self.kl_ref += objective.kl.sum_kl
        if objective.mismatch is not None:
            gap = objective.mismatch
            self.num_compared += gap.num_tokens
            self.mismatch += gap.sum_abs
            self.mismatch_ratio += gap.sum_ratio
            self.mismatch_kl += gap.sum_kl_k3
            self.max_mismatch = torch.maximum(self.max_mismatch, gap.max_abs.double())
            self.max_mismatch_ratio = torch.maximum(self.max_mismatch_ratio, gap.max_ratio.double())
        if objective.correction is not None:
            self.num_corrected += objective.correction.num_corrected
            self.correction += objective.correction.sum_factor

    def leave_out_prompts(self, count: int, num_rows: int, flops: float) -> None:
        """Prompts that `add` counted with their microbatches, and that were not computed for them.

        num_rows, flops: of one.
        """
        self.num_rows -= count * num_rows
        self.useful_flops -= count * flops

    def forget(self) -> None:
        """Back to zero, where another rank counts the same microbatches."""
        for field in fields(self):
            getattr(self, field.name).zero_()

    def over_ranks(self, data_parallel: DataParallel) -> dict[str, float]:
        """Every total as a number, the same on every rank. Waits for the device and for the other ranks."""
        names = [field.name for field in fields(self)]
        values = dict(zip(names, torch.stack([getattr(self, name) for name in names]).tolist(), strict=True))
        maxima = {name: values.pop(name) for name in names if name.startswith("max_")}
        return data_parallel.all_reduce_sums(values) | data_parallel.all_reduce_maxima(maxima)

    def result(
        self,
        data_parallel: DataParallel,
        algorithm: AlgorithmConfig,
        *,
        grad_norms: Sequence[float],
        learning_rate: float,
        num_microbatches: int,
        update_s: float,
    ) -> StepResult:
        """The step's report, the same on every rank but for `update_s`. grad_norms: of each update."""
        sums = self.over_ranks(data_parallel)
        num_loss_tokens, num_compared = max(sums["num_loss_tokens"], 1.0), sums["num_compared"]

        def of_compared(total: float) -> float | None:
            return total / num_compared if num_compared else None

        has_kl, is_corrected = algorithm.kl_in == "loss", algorithm.needs_rollout_logprobs
        return StepResult(
            loss=sums["loss"],
            grad_norm=max(grad_norms, default=0.0),
            learning_rate=learning_rate,
            num_updates=len(grad_norms),
            num_microbatches=num_microbatches,
            num_rows=int(sums["num_rows"]),
            num_logical_tokens=int(sums["num_logical_tokens"]),
            num_loss_tokens=int(sums["num_loss_tokens"]),
            useful_flops=sums["useful_flops"],
            entropy_mean=sums["entropy"] / num_loss_tokens,
            clipped_fraction=sums["num_clipped"] / num_loss_tokens,
            kl_old_mean=sums["kl_old"] / num_loss_tokens,
            ratio_mean=sums["ratio"] / num_loss_tokens,
            kl_ref_mean=sums["kl_ref"] / num_loss_tokens if has_kl else None,
            mismatch_mean_abs=of_compared(sums["mismatch"]),
            mismatch_max_abs=sums["max_mismatch"] if num_compared else None,
            mismatch_ratio_mean=of_compared(sums["mismatch_ratio"]),
            mismatch_ratio_max=sums["max_mismatch_ratio"] if num_compared else None,
            mismatch_kl_mean=of_compared(sums["mismatch_kl"]),
            corrected_fraction=of_compared(sums["num_corrected"]) if is_corrected else None,
            correction_mean=of_compared(sums["correction"]) if is_corrected else None,
            update_s=update_s,
        )
