"""Whether a variant computes the update.

Two questions, before any time is reported:

- On a slice (the model's first layers, short groups of odd lengths), log-probs and gradients against the same layers in
  float32 (float64 for float32 weights), through transformers' eager attention, one sequence at a time. What is allowed
  is twice what eager attention in the model's own dtype is out by, and a rounding band. With prompts of tens of tokens
  a key more or less, or a response that reads another, is far outside that.
- At full size, gradients against those of ours, fully recomputed and not compiled. Two right ways in bf16 drift apart
  through all layers, and thousands of keys hide a single wrong one: the bound is wide, and finds what breaks at size.

Gradients are compared by kind of weight, over evenly spaced entries of each.
"""

# Shape letters: M scored tokens, N responses.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.bench.outcome import WrongResultError
from ratoon.bench.policy_update.cases import make_group
from ratoon.bench.policy_update.microbatches import Microbatch, pack_plain
from ratoon.bench.policy_update.random_model import cut_copy
from ratoon.models import model_shape, stock_attention
from ratoon.types import RolloutGroup

SLICE_LAYERS = 2
SLICE_SEQUENCES = 2
"""Of a replicated microbatch on the slice: several microbatches, and a last one that is not full."""

FULL_SIZE_GAP = 0.2
"""Relative, of gradients at full size. Right ways of 28 layers in bf16 differ by 0.07 (narrow layers, on a CPU); where
the responses of a microbatch read one another it is 0.57."""

LOGPROBS = "log-probs"
_ATTENTION_WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_REST = "other weights"
_FULL_SIZE_KINDS = ("v_proj", "o_proj", _REST)
"""Gradients of q and k are differences of nearly equal sums where weights are random; their rounding says little."""

_ENTRIES = 65_536
"""Compared of each weight."""

_ERROR_FACTOR = 2.0
_BAND = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-12}
_EXPERT_BAND = {torch.bfloat16: 0.15, torch.float32: 2.0**-12}
"""Relative. A router's choice between nearly equal experts turns with rounding, and moves whole rows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an update came to: log-probs, and sampled gradients by kind of weight."""

    samples: dict[str, Tensor]
    """Log-probs [M], and for each kind its entries one after another."""

    def gaps_from(self, exact: "Result") -> dict[str, float]:
        """Norm of the difference over the norm of `exact`, by kind; log-probs about their mean."""
        gaps: dict[str, float] = {}
        for kind, wanted in exact.samples.items():
            got, wanted = self.samples[kind].to(wanted), wanted
            scale = (wanted - wanted.mean() if kind == LOGPROBS else wanted).norm()
            gap = float((got - wanted).norm() / scale)
            gaps[kind] = gap if gap == gap else torch.inf
        return gaps


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The small update that every variant is checked on."""

    groups: tuple[RolloutGroup, ...]
    exact: Result
    allowed: dict[str, float]
    """Relative gap of each kind that passes."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Slice":
        """Computes the exact update and what rounding may change. The model is not compiled yet."""
        groups = slice_groups(model_shape(model.config).vocab_size)
        microbatches = pack_plain(groups, model.device)
        wide = torch.float32 if model.dtype == torch.bfloat16 else torch.float64
        copy = cut_copy(model, SLICE_LAYERS, wide)
        exact = run_update(copy, microbatches)
        del copy
        with first_layers(model), stock_attention(model, "eager"):
            eager = run_update(model, microbatches)
        band = (_EXPERT_BAND if model_shape(model.config).num_experts else _BAND)[model.dtype]
        allowed = {kind: _ERROR_FACTOR * gap + band for kind, gap in eager.gaps_from(exact).items()}
        return cls(groups=groups, exact=exact, allowed=allowed)

    def check(self, model: PreTrainedModel, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """Gaps of a variant's update of `groups`, by kind. Raises WrongResultError where one is over its bound."""
        with first_layers(model):
            gaps = run_update(model, microbatches).gaps_from(self.exact)
        wrong = [
            f"{kind} out by {gap:.3g} (allowed {self.allowed[kind]:.3g})"
            for kind, gap in gaps.items()
            if not gap <= self.allowed[kind]
        ]
        if wrong:
            raise WrongResultError(f"on the slice, relative: {'; '.join(wrong)}")
        return gaps


def slice_groups(vocab_size: int) -> tuple[RolloutGroup, ...]:
    """Two prompts of odd lengths, five responses; one of a single token."""
    return (make_group(vocab_size, 61, [23, 1, 38], 1), make_group(vocab_size, 19, [45, 9], 2))


def check_full_size(result: Result, ours: Result) -> float:
    """Largest gap of the gradients from ours. Raises WrongResultError where it is over `FULL_SIZE_GAP`."""
    gaps = {kind: gap for kind, gap in result.gaps_from(ours).items() if kind in _FULL_SIZE_KINDS}
    kind, gap = max(gaps.items(), key=lambda item: item[1])
    if not gap <= FULL_SIZE_GAP:
        raise WrongResultError(f"at full size: {kind} out by {gap:.3g} of ours (allowed {FULL_SIZE_GAP:.3g})")
    return gap


def run_update(model: PreTrainedModel, microbatches: Sequence[Microbatch]) -> Result:
    """One update from no gradients; they are gone afterwards."""
    model.zero_grad(set_to_none=True)
    logprobs_M = torch.cat([microbatch.backward(model) for microbatch in microbatches])
    result = read_result(model, logprobs_M)
    model.zero_grad(set_to_none=True)
    return result


def read_result(model: PreTrainedModel, logprobs_M: Tensor) -> Result:
    """Of gradients that are there."""
    samples: dict[str, list[Tensor]] = {LOGPROBS: [logprobs_M]}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        kind = next((kind for kind in _ATTENTION_WEIGHTS if kind in name), _REST)
        # Odd, so that entries do not all lie in the columns of a power of two.
        step = (parameter.grad.numel() // _ENTRIES) | 1
        samples.setdefault(kind, []).append(parameter.grad.flatten()[::step].to(logprobs_M.dtype))
    return Result(samples={kind: torch.cat(parts) for kind, parts in samples.items()})


@contextmanager
def first_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model runs `SLICE_LAYERS` of its layers: transformers asks its configuration how many."""
    num_layers = model.config.num_hidden_layers
    model.config.num_hidden_layers = min(SLICE_LAYERS, num_layers)
    try:
        yield
    finally:
        model.config.num_hidden_layers = num_layers
