"""What a step reports, summed over microbatches and ranks without waiting for the device in between."""

# Shape letters: M scored tokens of one microbatch.

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ratoon.algorithms.losses import PolicyLoss
from ratoon.distributed import DataParallel
from ratoon.layout.packed_layout import PackedLayout
from ratoon.planner import useful_flops
from ratoon.types.model_shape import ModelShape


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
    """Loss tokens that the clip left without gradient."""

    kl_old_mean: float
    """Nats per token, estimate k3 of KL(old policy || policy)."""

    ratio_mean: float
    mismatch_mean_abs: float | None
    """Nats. |old_logprobs - rollout_logprobs|, before any correction; None where the engine gave none."""

    mismatch_max_abs: float | None
    update_s: float
    """Forward, backward and optimizer, old log-probs included."""

    @property
    def dedup_ratio(self) -> float:
        """Measured: logical tokens over rows computed."""
        return self.num_logical_tokens / self.num_rows if self.num_rows else 1.0


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
    entropy: Tensor
    num_compared: Tensor
    mismatch: Tensor
    mismatch_max: Tensor
    """A maximum, not a sum."""

    @classmethod
    def zeros(cls, device: torch.device) -> "StepTotals":
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def add_rows(self, layout: PackedLayout, shape: ModelShape) -> None:
        self.num_rows += layout.num_rows
        self.num_logical_tokens += layout.num_logical_tokens
        self.useful_flops += useful_flops(shape, layout)

    @torch.no_grad()
    def add_loss(self, loss: Tensor, policy_loss: PolicyLoss, entropy_M: Tensor) -> None:
        self.loss += loss
        self.num_loss_tokens += policy_loss.num_loss_tokens
        self.num_clipped += policy_loss.num_clipped_low + policy_loss.num_clipped_high
        self.ratio += policy_loss.sum_ratio
        self.kl_old += policy_loss.sum_kl_k3
        self.entropy += entropy_M.sum()

    @torch.no_grad()
    def add_mismatch(self, old_logprobs_M: Tensor, rollout_logprobs_M: Tensor) -> None:
        gap_M = (old_logprobs_M - rollout_logprobs_M).abs()
        self.num_compared += gap_M.numel()
        self.mismatch += gap_M.sum()
        self.mismatch_max = torch.maximum(self.mismatch_max, gap_M.max().double())

    def over_ranks(self, data_parallel: DataParallel) -> dict[str, float]:
        """Every total as a number, the same on every rank. Waits for the device and for the other ranks."""
        names = [field.name for field in fields(self)]
        values = dict(zip(names, torch.stack([getattr(self, name) for name in names]).tolist(), strict=True))
        largest = data_parallel.all_reduce_maxima({"mismatch_max": values.pop("mismatch_max")})
        return data_parallel.all_reduce_sums(values) | largest
