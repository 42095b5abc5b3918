"""What the policy is worth on prompts that are never trained on."""

# Shape letters: Q prompts.

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.config.evaluation import EvaluationConfig
from ratoon.distributed import DataParallel
from ratoon.loop.repeats import tell_apart
from ratoon.loop.stages import generate_groups
from ratoon.metrics.rows import MetricValue
from ratoon.rollout import RolloutEngine
from ratoon.types.rollouts import Prompt, RolloutGroup
from ratoon.types.sampling import SamplingParams

ScoreFn = Callable[[Sequence[RolloutGroup]], Awaitable[Sequence[RolloutGroup]]]
"""Groups to the same groups with rewards. Responses whose reward failed may be missing, and whole groups too."""

_ROUNDING = 1e-9
"""By which a reward may miss the threshold, or its bounds, and be taken for them: 0.1 + 0.2 + 0.7 passes 1."""

_Z = 1.959964
"""Of a two-sided 95 % interval of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """The share of prompts of which at least one of k answers passes, estimated."""

    k: int
    mean: float
    low: float
    high: float
    """Ends of the 95 % confidence interval (`pass_interval`)."""

    num_prompts: int
    """Prompts with at least k scored answers; the others tell nothing about k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The rewards of a set of prompts. Means of rewards are over prompts, of lengths over responses."""

    reward_mean: float
    """NaN where no response was scored."""

    reward_standard_error: float
    """Of the mean, clustered by prompt: answers to one prompt are no independent draws. NaN for
    less than two prompts."""

    num_prompts: int
    """With at least one scored response: the denominator of `reward_mean`."""

    num_responses: int
    """Scored ones."""

    num_lost_responses: int
    """Asked for, and not scored: the engine gave none, or the reward failed and was dropped."""

    truncated_fraction: float
    """Share of the responses generated that the token budget ended."""

    response_tokens_mean: float
    """Over the responses generated, truncated ones included."""

    pass_rates: tuple[PassRate, ...]
    """For k = 1, 2, 4, ... and the group size; without those k that no prompt has answers for."""

    reward_interval: tuple[float, float]
    """95 % confidence interval of the mean (`reward_interval`)."""

    @property
    def reward_in_words(self) -> str:
        """The mean and its standard error, which one prompt does not have."""
        error = self.reward_standard_error
        return f"{self.reward_mean:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")

    def metrics(self) -> dict[str, MetricValue]:
        """One flat row for metrics.jsonl: pass rates as `pass_at_K`, `pass_at_K_low` and `pass_at_K_high`."""
        row: dict[str, MetricValue] = {
            "reward_mean": self.reward_mean,
            "reward_standard_error": self.reward_standard_error,
            "num_prompts": self.num_prompts,
            "num_responses": self.num_responses,
            "num_lost_responses": self.num_lost_responses,
            "truncated_fraction": self.truncated_fraction,
            "response_tokens_mean": self.response_tokens_mean,
        }
        for rate in self.pass_rates:
            name = f"pass_at_{rate.k}"
            row |= {name: rate.mean, f"{name}_low": rate.low, f"{name}_high": rate.high}
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One evaluation's responses."""

    num_responses_asked: int
    generated: tuple[RolloutGroup, ...]
    """As the engine gave them, one group for each prompt."""

    scored: tuple[RolloutGroup, ...]
    """Those that have a reward."""


async def answer(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    sampling: SamplingParams,
    score: ScoreFn,
    ranks: DataParallel | None = None,
) -> Answers:
    """Answers and scores every prompt.

    The draws depend on `sampling.seed` and the prompts' ids alone, so that two evaluations differ by the policy alone.
    ranks: share the answering; they call it together.
    """
    generated = await generate_groups(
        engine, tell_apart(prompts), group_size=group_size, sampling=sampling, step=0, ranks=ranks
    )
    scored = await score([group for group in generated if group.group_size])
    return Answers(
        num_responses_asked=len(prompts) * group_size,
        generated=tuple(generated),
        scored=tuple(group for group in scored if group.group_size),
    )


async def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    config: EvaluationConfig,
    training: SamplingParams,
    score: ScoreFn,
    reward_bounds: tuple[float, float] | None = None,
    ranks: DataParallel | None = None,
) -> Evaluation | None:
    """Answers, scores and measures `prompts`; None where there are none.

    training: how the run itself samples, for what `config` leaves open; its seed fixes the draws.
    reward_bounds: as for `measure`. ranks: as for `answer`.
    """
    if not prompts:
        return None
    answers = await answer(
        engine,
        prompts,
        group_size=config.group_size,
        sampling=config.sampling_params(training),
        score=score,
        ranks=ranks,
    )
    return measure(
        answers, group_size=config.group_size, pass_threshold=config.pass_threshold, reward_bounds=reward_bounds
    )


def measure(
    answers: Answers, *, group_size: int, pass_threshold: float, reward_bounds: tuple[float, float] | None = None
) -> Evaluation:
    """The figures of one evaluation, whatever of it was lost.

    reward_bounds: the least and the greatest reward that there can be; None where that is not known.
    """
    responses = [response for group in answers.generated for response in group.responses]
    rewards = [group.rewards_N for group in answers.scored if group.rewards_N is not None]
    assert len(rewards) == len(answers.scored), "a scored group has rewards"
    means_Q = np.asarray([rewards_N.mean() for rewards_N in rewards])
    num_scored = sum(rewards_N.size for rewards_N in rewards)
    num_passed = [(int((rewards_N >= pass_threshold - _ROUNDING).sum()), rewards_N.size) for rewards_N in rewards]
    rates = (_pass_rate(num_passed, k) for k in _ks(group_size))
    error = float(means_Q.std(ddof=1) / math.sqrt(means_Q.size)) if means_Q.size > 1 else math.nan
    return Evaluation(
        reward_mean=float(means_Q.mean()) if means_Q.size else math.nan,
        reward_standard_error=error,
        reward_interval=reward_interval(rewards, error, bounds=reward_bounds),
        num_prompts=means_Q.size,
        num_responses=num_scored,
        num_lost_responses=answers.num_responses_asked - num_scored,
        truncated_fraction=float(np.mean([response.is_truncated for response in responses])) if responses else 0.0,
        response_tokens_mean=float(np.mean([response.num_tokens for response in responses])) if responses else 0.0,
        pass_rates=tuple(rate for rate in rates if rate is not None),
    )


def reward_interval(
    rewards: Sequence[NDArray[np.float64]], standard_error: float, *, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    """95 % confidence interval of the mean over prompts.

    rewards: of each prompt, [its answers]. standard_error: of the mean, clustered by prompt. Normal, 1.96 standard
    errors to either side, and never beyond `bounds`; Wilson's (`pass_interval`) where every reward is one of the two,
    so that ten of ten right answers leave room for a wrong one. Rewards outside of `bounds` show that they are none.
    """
    if not rewards:
        return math.nan, math.nan
    means_Q = np.asarray([rewards_N.mean() for rewards_N in rewards])
    all_rewards = np.concatenate(rewards)
    mean, half = float(means_Q.mean()), _Z * standard_error
    if bounds is None or all_rewards.min() < bounds[0] - _ROUNDING or all_rewards.max() > bounds[1] + _ROUNDING:
        return mean - half, mean + half
    least, greatest = bounds
    if least < greatest and (np.abs(np.subtract.outer(all_rewards, bounds)) <= _ROUNDING).any(axis=1).all():
        most = max(rewards_N.size for rewards_N in rewards)
        rates_Q = ((means_Q - least) / (greatest - least)).clip(0, 1)
        low, high = pass_interval(rates_Q.tolist(), max_draws_per_prompt=most)
        return least + (greatest - least) * low, least + (greatest - least) * high
    return max(mean - half, least), min(mean + half, greatest)


def pass_at_k(num_passed: int, num_answers: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers passes: 1 - C(n - c, k) / C(n, k).

    n >= k answers were drawn, c of them passed. Chen et al., arXiv:2107.03374, section 2.1.
    """
    assert 0 <= num_passed <= num_answers, f"{num_passed} of {num_answers} answers passed"
    assert 1 <= k <= num_answers, f"pass@{k} needs {k} answers, got {num_answers}"
    return 1.0 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def pass_interval(rates_Q: Sequence[float], *, max_draws_per_prompt: float) -> tuple[float, float]:
    """95 % confidence interval of the mean of per-prompt pass rates: Wilson's, clustered by prompt.

    rates_Q: [Q] in [0, 1], Q >= 1. Wilson's interval for a proportion (JASA 1927), with the effective number of
    independent draws that the spread over prompts leaves (Korn and Graubard, Survey Methodology 1998): as many as
    give the spread seen: Q for single answers, which makes it Wilson's own. They are at most `max_draws_per_prompt` a
    prompt, and Q where there is one prompt, or all agree on 0 or 1. So 10 passes of 10 are [0.72, 1].
    """
    rates = np.asarray(rates_Q, np.float64)
    Q, mean = rates.size, float(rates.mean())
    variance, most = float(rates.var()), Q * max_draws_per_prompt
    if Q == 1 or mean in (0.0, 1.0):
        draws = float(Q)
    elif variance > 0:
        draws = min(Q * mean * (1 - mean) / variance, most)
    else:
        draws = most
    scale = 1 + _Z**2 / draws
    centre = (mean + _Z**2 / (2 * draws)) / scale
    half = _Z / scale * math.sqrt(mean * (1 - mean) / draws + _Z**2 / (4 * draws**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _pass_rate(num_passed: Sequence[tuple[int, int]], k: int) -> PassRate | None:
    rates_Q = [pass_at_k(passed, drawn, k) for passed, drawn in num_passed if drawn >= k]
    if not rates_Q:
        return None
    most_draws = max(drawn for _, drawn in num_passed) / k
    low, high = pass_interval(rates_Q, max_draws_per_prompt=most_draws)
    return PassRate(k=k, mean=float(np.mean(rates_Q)), low=low, high=high, num_prompts=len(rates_Q))


def _ks(group_size: int) -> list[int]:
    """1, 2, 4, ... below the group size, and the group size."""
    return [*(2**power for power in range((group_size - 1).bit_length())), group_size]
