"""One step of the policy by definition: one forward per sequence, a loop over responses, torch's own optimizer."""

# Shape letters: R response tokens, V vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from ratoon.trainer import MasterOptimizer, StepResult, Trainer, Update
from ratoon.types import Prompt, Response, RolloutGroup

FAMILY = "qwen3"
TEMPERATURE = 0.7
LEARNING_RATE = 0.01
MAX_GRAD_NORM = 0.5
"""Below the norms here, so that clipping acts."""

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


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


def run_trainer(
    updates: Sequence[Update], algorithm: AlgorithmConfig, data_parallel: DataParallel | None = None
) -> tuple[Outcome, StepResult]:
    """The step by the Trainer, in float64."""
    model = attached_model()
    model.load_state_dict(build_model(FAMILY).state_dict())
    optimizer = RecordingOptimizer(model)
    trainer = Trainer(
        model,
        optimizer,
        algorithm=algorithm,
        temperature=TEMPERATURE,
        max_grad_norm=MAX_GRAD_NORM,
        data_parallel=data_parallel or single_process(),
    )
    with kept_in_float64():
        result = trainer.step(updates, learning_rate=LEARNING_RATE)
    outcome = Outcome(
        loss=result.loss,
        gradients=optimizer.recorded,
        weights=weights_of(model),
        entropy_mean=result.entropy_mean,
        ratio_mean=result.ratio_mean,
        kl_old_mean=result.kl_old_mean,
        clipped_fraction=result.clipped_fraction,
        grad_norm=result.grad_norm,
        mismatch_mean_abs=result.mismatch_mean_abs,
        mismatch_max_abs=result.mismatch_max_abs,
    )
    return outcome, result


def run_by_hand(minibatches: Sequence[Sequence[RolloutGroup]], algorithm: AlgorithmConfig) -> Outcome:
    """The same step from the papers' formulas: arXiv 2402.03300 eq. 3, arXiv 2503.14476 eq. 8."""
    model = build_model(FAMILY)
    model.set_attn_implementation("eager")
    adamw = adamw_of(model)
    outcome = Outcome()
    ratios: list[float] = []
    entropies: list[float] = []
    gaps: list[float] = []
    num_clipped = 0
    with kept_in_float64():
        with torch.no_grad():
            old = {id(r): score(model, g, r)[0] for groups in minibatches for g in groups for r in g.responses}
        for groups in minibatches:
            num_responses = sum(len(group.responses) for group in groups)
            num_tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
            losses: list[Tensor] = []
            for group, response, advantage in each_response(groups):
                logprobs_R, entropy_R = score(model, group, response)
                ratio_R = torch.exp(logprobs_R - old[id(response)])
                used_R, is_clipped_R = clipped(ratio_R, advantage, algorithm)
                share = 1 / num_tokens
                if algorithm.loss_mean == "sequence":
                    share = 1 / (len(response.token_ids) * num_responses)
                losses.append(-share * (advantage * used_R + algorithm.entropy_coefficient * entropy_R).sum())
                ratios += ratio_R.tolist()
                entropies += entropy_R.tolist()
                gaps += (old[id(response)] - torch.tensor(response.rollout_logprobs)).abs().tolist()
                num_clipped += int(is_clipped_R.sum())
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
    outcome.entropy_mean = float(np.mean(entropies))
    outcome.ratio_mean = float(np.mean(ratios))
    outcome.kl_old_mean = float(np.mean([ratio - 1 - np.log(ratio) for ratio in ratios]))
    outcome.clipped_fraction = num_clipped / len(ratios)
    outcome.mismatch_mean_abs, outcome.mismatch_max_abs = float(np.mean(gaps)), max(gaps)
    return outcome


def adamw_of(model: PreTrainedModel) -> torch.optim.AdamW:
    """Decays matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
    )


def clipped(ratio_R: Tensor, advantage: float, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The ratios that count, and whether each stands at its limit: the upper for good responses, else the lower."""
    limit = 1 + algorithm.clip_high if advantage > 0 else 1 - algorithm.clip_low
    is_clipped_R = ratio_R > limit if advantage > 0 else ratio_R < limit
    return torch.where(is_clipped_R, limit, ratio_R), is_clipped_R


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
