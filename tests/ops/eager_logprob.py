"""The oracle for `linear_logprob`: the formula written once more, on the whole [M, V]."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ratoon.ops import linear_logprob


@dataclass(frozen=True)
class Case:
    """Inputs of one call and what the loss makes of its two results."""

    hidden_MC: Tensor
    weight_VC: Tensor
    target_M: Tensor
    bias_V: Tensor | None
    loss_weights_2M: Tensor
    """[2, M]: the loss is the sum of these times (logprobs, entropy)."""
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, *args: Any) -> "Case":
        """Another dtype or device; the loss weights and targets keep their dtype."""
        device_only = [arg for arg in args if not isinstance(arg, torch.dtype)]
        return Case(
            hidden_MC=self.hidden_MC.to(*args),
            weight_VC=self.weight_VC.to(*args),
            target_M=self.target_M.to(*device_only) if device_only else self.target_M,
            bias_V=None if self.bias_V is None else self.bias_V.to(*args),
            loss_weights_2M=self.loss_weights_2M.to(*device_only) if device_only else self.loss_weights_2M,
            options=self.options,
        )


def make_case(
    M: int, C: int, V: int, *, bias: bool = False, spread: float = 2.0, seed: int = 0, **options: Any
) -> Case:
    """fp64 on the CPU; logits of standard deviation `spread`. Options go to linear_logprob."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Case(
        hidden_MC=normal(M, C),
        weight_VC=normal(V, C) * (spread / C**0.5),
        target_M=torch.randint(0, V, (M,), generator=generator),
        bias_V=normal(V) if bias else None,
        loss_weights_2M=normal(2, M),
        options=options,
    )


@dataclass(frozen=True)
class Outcome:
    """Two results and three gradients; None where there is no bias."""

    logprobs_M: Tensor
    entropy_M: Tensor
    grad_hidden_MC: Tensor
    grad_weight_VC: Tensor
    grad_bias_V: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Those that exist."""
        return {name: value for name, value in vars(self).items() if value is not None}


def eager_logits(
    hidden_MC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Tensor:
    """[M, V] in hidden's dtype, as a transformers model and a sampler make them."""
    logits_MV = hidden_MC @ weight_VC.T
    if bias_V is not None:
        logits_MV = logits_MV + bias_V
    logits_MV = logits_MV * logit_scale
    if logit_softcap is not None:
        logits_MV = torch.tanh(logits_MV / logit_softcap) * logit_softcap
    return logits_MV / temperature


def eager_scores(logits_MV: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
    """Low-precision logits are widened first, which is what careful trainers do."""
    wide_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    log_softmax_MV = wide_MV.log_softmax(-1)
    logprobs_M = log_softmax_MV.gather(1, target_M.long()[:, None]).squeeze(1)
    return logprobs_M, -(log_softmax_MV.exp() * log_softmax_MV).sum(-1)


def run_eager(case: Case) -> Outcome:
    """Differentiated by autograd."""
    return _run(case, lambda h, w, t, b: eager_scores(eager_logits(h, w, b, **case.options), t))


def run_ours(case: Case) -> Outcome:
    """`linear_logprob` on the same inputs."""
    return _run(case, lambda h, w, t, b: linear_logprob(h, w, t, bias=b, **case.options))


def _run(case: Case, score: Any) -> Outcome:
    hidden_MC, weight_VC = (x.detach().clone().requires_grad_() for x in (case.hidden_MC, case.weight_VC))
    bias_V = None if case.bias_V is None else case.bias_V.detach().clone().requires_grad_()
    logprobs_M, entropy_M = score(hidden_MC, weight_VC, case.target_M, bias_V)
    (case.loss_weights_2M[0] * logprobs_M + case.loss_weights_2M[1] * entropy_M).sum().backward()
    assert hidden_MC.grad is not None
    assert weight_VC.grad is not None
    return Outcome(
        logprobs_M=logprobs_M.detach(),
        entropy_M=entropy_M.detach(),
        grad_hidden_MC=hidden_MC.grad,
        grad_weight_VC=weight_VC.grad,
        grad_bias_V=None if bias_V is None else bias_V.grad,
    )


def largest_error(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, 0 for empty tensors."""
    return float((got.double() - exact.double()).abs().max()) if exact.numel() else 0.0


def assert_close(got: Outcome, exact: Outcome, *, rtol: float) -> None:
    """Every result within rtol of its own largest entry (of 1, where all entries are smaller)."""
    for name, exact_value in exact.named().items():
        got_value = got.named()[name]
        assert got_value.shape == exact_value.shape, name
        scale = max(1.0, largest_error(exact_value, torch.zeros_like(exact_value)))
        error = largest_error(got_value, exact_value)
        assert error <= rtol * scale, f"{name} is off by {error:.3g}, scale {scale:.3g}"
