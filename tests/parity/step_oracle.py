"""One step of the policy by definition: one forward per sequence, a loop over responses, torch's own optimizer."""

# Shape letters: R response tokens, V vocabulary.

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from tests.parity.families import VOCAB_SIZE, backward, build_model, gradients, kept_in_float64
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import DataParallel, single_process
from ratoon.models import attach
from ratoon.trainer import MasterOptimizer, StepResult, Trainer, Update, frozen_reference
from ratoon.types import Prompt, Response, RolloutGroup

FAMILY = "qwen3"
TEMPERATURE = 0.7
LEARNING_RATE = 0.01
MAX_GRAD_NORM = 0.5
"""Below the norms here, so that clipping acts."""

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_RESPONSE_TOKENS = 11
REFERENCE_SEED = 1
NARROW: dict[str, Any] = {"clip_low": 0.03, "clip_high": 0.05, "entropy_coefficient": 0.05, "num_minibatches": 2}
"""Ratios leave this range after the first of two updates."""


def algorithm_cases() -> dict[str, AlgorithmConfig]:
    """Every algorithm, every KL in the loss, every correction, and some together."""
    given: dict[str, dict[str, Any]] = {
        "grpo": {},
        "dr-grpo": {},
        "dapo": {},
        "rloo": {},
        "reinforce++": {},
        "reinforce++-baseline": {},
        "gspo": {},
        "cispo": {},
        "cispo without a lower bound": {"name": "cispo", "clip_low": None},
        "gspo with a mean over tokens": {"name": "gspo", "loss_mean": "token"},
        "dual clip": {"name": "grpo", "dual_clip": 1.07},
        "k3": {"name": "grpo", "kl_coefficient": 0.3},
        "k2": {"name": "reinforce++-baseline", "kl_coefficient": 0.3},
        "token-tis": {"name": "grpo", "mismatch_correction": "token-tis", "mismatch_max_ratio": 1.2},
        "sequence-tis": {"name": "grpo", "mismatch_correction": "sequence-tis", "mismatch_max_ratio": 1.5},
        "sequence-tis by mean": {
            "name": "dapo",
            "mismatch_correction": "sequence-tis",
            "mismatch_sequence_ratio": "geometric-mean",
            "mismatch_max_ratio": 1.05,
        },
        "masked-is": {"name": "dapo", "mismatch_correction": "masked-is", "mismatch_max_ratio": 1.2},
        "sequence-masked-is": {"name": "grpo", "mismatch_correction": "sequence-masked-is", "mismatch_max_ratio": 1.5},
        "icepop": {
            "name": "dr-grpo",
            "mismatch_correction": "icepop",
            "mismatch_min_ratio": 0.8,
            "mismatch_max_ratio": 1.2,
        },
        "gspo with k3 and icepop": {
            "name": "gspo",
            "kl_coefficient": 0.3,
            "mismatch_correction": "icepop",
            "mismatch_max_ratio": 1.3,
        },
        "cispo with k2 and sequence-tis": {
            "name": "cispo",
            "kl_coefficient": 0.3,
            "kl_estimator": "k2",
            "mismatch_correction": "sequence-tis",
            "mismatch_max_ratio": 1.5,
        },
    }
    return {case: AlgorithmConfig(**{"name": case, **NARROW, **settings}) for case, settings in given.items()}


def make_group(rng: np.random.Generator, prompt: list[int], response_lengths: Sequence[int]) -> RolloutGroup:
    """Random responses and advantages; the advantages do not sum to 0, so that losses do not cancel."""
    responses = [
        Response(rng.integers(3, VOCAB_SIZE, length), rollout_logprobs=-5 * rng.random(length, np.float32))
        for length in response_lengths
    ]
    return RolloutGroup(
        Prompt("p", np.array(prompt)), tuple(responses), advantages_N=rng.normal(0.3, 1.0, len(responses))
    )


def ragged_groups(seed: int = 0) -> tuple[RolloutGroup, ...]:
    """A prompt of one token, empty responses, a group of one, of nothing but emptiness, one prompt in two groups."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB_SIZE, 6).tolist()
    return (
        make_group(rng, [5], [5, 1, 0]),
        make_group(rng, shared, [4, 7]),
        make_group(rng, rng.integers(3, VOCAB_SIZE, 9).tolist(), [3]),
        make_group(rng, shared, [2, 6]),
        make_group(rng, shared[:4], [0]),
    )


@dataclass(slots=True)
class Outcome:
    """What a step leaves behind."""

    loss: float = 0.0
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each update, before clipping."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    entropy_mean: float = 0.0
    ratio_mean: float = 0.0
    kl_old_mean: float = 0.0
    clipped_fraction: float = 0.0
    grad_norm: float = 0.0
    mismatch_mean_abs: float | None = None
    mismatch_max_abs: float | None = None
    mismatch_ratio_mean: float | None = None
    mismatch_ratio_max: float | None = None
    mismatch_kl_mean: float | None = None
    kl_ref_mean: float | None = None
    corrected_fraction: float | None = None
    correction_mean: float | None = None

    def reported(self) -> dict[str, float | None]:
        """Everything but what the step did to the model."""
        return {name: value for name, value in asdict(self).items() if name not in ("loss", "gradients", "weights")}


class RecordingOptimizer(MasterOptimizer):
    """Keeps what has accumulated when `step` is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.parameters(), learning_rate=1.0, weight_decay=WEIGHT_DECAY, betas=BETAS)
        self.names = [name for name, _ in model.named_parameters()]
        self.recorded: list[dict[str, Tensor]] = []

    def step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        pairs = zip(self.names, self.masters, strict=True)
        self.recorded.append({name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in pairs})
        return super().step(learning_rate=learning_rate, max_grad_norm=max_grad_norm)


@cache
def attached_model() -> PreTrainedModel:
    """One for all runs: the check at attach time takes longer than a step."""
    return attach(build_model(FAMILY))


@cache
def reference_model() -> PreTrainedModel:
    return attach(build_model(FAMILY, REFERENCE_SEED))


def make_trainer(algorithm: AlgorithmConfig, data_parallel: DataParallel | None = None) -> Trainer:
    """Of the attached model, with its first weights."""
    model = attached_model()
    model.load_state_dict(build_model(FAMILY).state_dict())
    return Trainer(
        model,
        RecordingOptimizer(model),
        algorithm=algorithm,
        temperature=TEMPERATURE,
        max_grad_norm=MAX_GRAD_NORM,
        data_parallel=data_parallel or single_process(),
        reference=frozen_reference(reference_model(), TEMPERATURE) if algorithm.needs_reference else None,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )


def run_trainer(
    updates: Sequence[Update], algorithm: AlgorithmConfig, data_parallel: DataParallel | None = None
) -> tuple[Outcome, StepResult]:
    """The step by the Trainer, in float64."""
    model = attached_model()
    trainer = make_trainer(algorithm, data_parallel)
    optimizer = trainer.optimizer
    assert isinstance(optimizer, RecordingOptimizer)
    with kept_in_float64():
        result = trainer.step(updates, learning_rate=LEARNING_RATE)
    shared = {item.name for item in fields(Outcome)} - {"gradients", "weights"}
    reported = {name: getattr(result, name) for name in shared}
    return Outcome(gradients=optimizer.recorded, weights=weights_of(model), **reported), result


def run_by_hand(minibatches: Sequence[Sequence[RolloutGroup]], algorithm: AlgorithmConfig) -> Outcome:
    """The same step from the papers' formulas, which `response_objective` and `correction` spell out."""
    model = build_model(FAMILY)
    model.set_attn_implementation("eager")
    frozen = build_model(FAMILY, REFERENCE_SEED)
    frozen.set_attn_implementation("eager")
    adamw = adamw_of(model)
    outcome = Outcome()
    seen = Seen()
    with kept_in_float64():
        with torch.no_grad():
            everything = [
                (group, response) for groups in minibatches for group in groups for response in group.responses
            ]
            old = {id(response): score(model, group, response)[0] for group, response in everything}
            ref = {id(response): score(frozen, group, response)[0] for group, response in everything}
        for groups in minibatches:
            num_responses = sum(len(group.responses) for group in groups)
            num_tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
            losses: list[Tensor] = []
            for group, response, advantage in each_response(groups):
                logprobs_R, entropy_R = score(model, group, response)
                share = {
                    "token": 1 / num_tokens,
                    "sequence": 1 / (len(response.token_ids) * num_responses),
                    "constant": 1 / (MAX_RESPONSE_TOKENS * num_responses),
                }[algorithm.loss_mean]
                gaps = (old[id(response)] - torch.tensor(response.rollout_logprobs)).tolist()
                factors = correction(gaps, algorithm, seen)
                used_R = response_objective(logprobs_R, old[id(response)], advantage, factors, algorithm, seen)
                reward_R = used_R.new_tensor(factors) * used_R + algorithm.entropy_coefficient * entropy_R
                if algorithm.kl_coefficient:
                    kl_R = kl_by_hand(logprobs_R, ref[id(response)], algorithm.kl_estimator)
                    reward_R = reward_R - algorithm.kl_coefficient * kl_R
                    seen.kls += kl_R.tolist()
                losses.append(-share * reward_R.sum())
                seen.entropies += entropy_R.tolist()
            loss = torch.stack(losses).sum()
            backward(loss)
            outcome.loss += loss.item()
            kept = gradients(model)
            outcome.gradients.append(kept)
            for name, parameter in model.named_parameters():
                parameter.grad = kept[name].clone()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
            outcome.grad_norm = max(outcome.grad_norm, norm)
            adamw.step()
            adamw.zero_grad()
    outcome.weights = weights_of(model)
    seen.report(outcome)
    return outcome


@dataclass(slots=True)
class Seen:
    """Numbers of every token of a step, and what is reported of them."""

    ratios: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    num_corrected: int = 0
    num_clipped: int = 0

    def report(self, outcome: Outcome) -> None:
        outcome.entropy_mean = float(np.mean(self.entropies))
        outcome.ratio_mean = float(np.mean(self.ratios))
        outcome.kl_old_mean = float(np.mean([ratio - 1 - np.log(ratio) for ratio in self.ratios]))
        outcome.clipped_fraction = self.num_clipped / len(self.ratios)
        outcome.mismatch_mean_abs = float(np.mean(np.abs(self.gaps)))
        outcome.mismatch_max_abs = float(np.max(np.abs(self.gaps)))
        outcome.mismatch_ratio_mean = float(np.mean(np.exp(self.gaps)))
        outcome.mismatch_ratio_max = float(np.max(np.exp(self.gaps)))
        outcome.mismatch_kl_mean = float(np.mean([math.exp(gap) - 1 - gap for gap in self.gaps]))
        if self.kls:
            outcome.kl_ref_mean = float(np.mean(self.kls))
        if self.factors:
            outcome.correction_mean = float(np.mean(self.factors))
            outcome.corrected_fraction = self.num_corrected / len(self.factors)


def response_objective(
    logprobs_R: Tensor,
    old_R: Tensor,
    advantage: float,
    factors: list[float],
    algorithm: AlgorithmConfig,
    seen: Seen,
) -> Tensor:
    """[R] what each token adds to the objective, to be maximised, before its correction. Tokens that the correction
    masks are not counted as clipped.

    PPO clip: arXiv 2402.03300 eq. 3, arXiv 2503.14476 eq. 8, dual clip arXiv 1912.09729. GSPO: arXiv 2507.18071 eq. 5
    to 7. CISPO: arXiv 2506.13585 eq. 4 and 5.
    """
    log_ratio_R = logprobs_R - old_R
    seen.ratios += log_ratio_R.exp().tolist()
    upper = 1 + algorithm.clip_high
    lower = 0.0 if algorithm.clip_low is None else 1 - algorithm.clip_low
    if algorithm.policy_loss == "cispo":
        terms = []
        for logprob, ratio, factor in zip(logprobs_R, log_ratio_R.exp().tolist(), factors, strict=True):
            seen.num_clipped += factor > 0 and not lower <= ratio <= upper
            terms.append(min(max(ratio, lower), upper) * advantage * logprob)
        return torch.stack(terms)
    ratio_R = log_ratio_R.exp()
    if algorithm.policy_loss == "gspo":
        ratio_R = torch.exp(log_ratio_R.sum() / len(log_ratio_R)).expand(len(log_ratio_R))
    terms = []
    for ratio, factor in zip(ratio_R, factors, strict=True):
        if advantage > 0:
            is_cut, limit = ratio.item() > upper, upper
        elif algorithm.dual_clip is not None and ratio.item() > algorithm.dual_clip:
            is_cut, limit = True, algorithm.dual_clip
        else:
            is_cut, limit = ratio.item() < lower, lower
        seen.num_clipped += is_cut and factor > 0
        terms.append(advantage * (ratio.new_tensor(limit) if is_cut else ratio))
    return torch.stack(terms)


def correction(gaps: list[float], algorithm: AlgorithmConfig, seen: Seen) -> list[float]:
    """What multiplies each token's objective, from old - rollout log-probs of one response."""
    seen.gaps += gaps
    if algorithm.mismatch_correction == "none":
        return [1.0] * len(gaps)
    ratios = [math.exp(gap) for gap in gaps]
    if algorithm.mismatch_correction.startswith("sequence"):
        ratio = math.prod(ratios)
        if algorithm.mismatch_sequence_ratio == "geometric-mean":
            ratio = ratio ** (1 / len(gaps))
        ratios = [ratio] * len(gaps)
    factors = []
    for ratio in ratios:
        is_out = ratio > (algorithm.mismatch_max_ratio or 0) or ratio < (algorithm.mismatch_min_ratio or 0)
        seen.num_corrected += is_out
        cut = algorithm.mismatch_max_ratio if algorithm.mismatch_correction.endswith("tis") else 0.0
        factors.append(cut if is_out else ratio)
    seen.factors += factors
    return factors


def kl_by_hand(logprobs_R: Tensor, ref_R: Tensor, estimator: str | None) -> Tensor:
    """k2 and k3 of Schulman's note, with r = reference over policy."""
    log_r_R = ref_R - logprobs_R
    return 0.5 * log_r_R**2 if estimator == "k2" else (log_r_R.exp() - 1) - log_r_R


def adamw_of(model: PreTrainedModel) -> torch.optim.AdamW:
    """Decays matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
    )


def each_response(groups: Sequence[RolloutGroup]) -> list[tuple[RolloutGroup, Response, float]]:
    """Those with tokens, and their advantages."""
    return [
        (group, response, float(advantage))
        for group in groups
        for response, advantage in zip(group.responses, group.advantages_N.tolist(), strict=True)  # pyright: ignore[reportOptionalMemberAccess]
        if len(response.token_ids)
    ]


def score(model: PreTrainedModel, group: RolloutGroup, response: Response) -> tuple[Tensor, Tensor]:
    """[R] log-probs and [R] entropies of a response, from the full logits of prompt and response alone."""
    ids = torch.tensor(np.concatenate([group.prompt.token_ids, response.token_ids]))
    first = len(group.prompt.token_ids)
    logits_RV = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1] / TEMPERATURE
    all_RV = logits_RV.log_softmax(dim=-1)
    return all_RV.gather(1, ids[first:, None])[:, 0], -(all_RV.exp() * all_RV).sum(dim=-1)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_outcome(found: Outcome, expected: Outcome, where: Any = "") -> None:
    """Loss, every gradient and every weight to 1e-9 of the largest in its tensor."""
    assert abs(found.loss - expected.loss) <= 1e-9 * abs(expected.loss), f"{where}: {found.loss} for {expected.loss}"
    assert len(found.gradients) == len(expected.gradients)
    pairs = [*zip(found.gradients, expected.gradients, strict=True), (found.weights, expected.weights)]
    for number, (ours, theirs) in enumerate(pairs):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = float(value.abs().max())
            error = float((ours[name] - value).abs().max())
            assert error <= 1e-9 * scale, f"{where}: {name} ({number}) is off by {error:.1e} of {scale:.1e}"
