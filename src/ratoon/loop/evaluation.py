"""Mean reward on prompts that are never trained on."""

from dataclasses import dataclass

import numpy as np

from ratoon.config.recipe import Recipe
from ratoon.loop.inputs import Inputs
from ratoon.loop.stages import generate_groups
from ratoon.rewards import score
from ratoon.rollout import RolloutEngine
from ratoon.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out prompts' rewards."""

    reward_mean: float
    reward_standard_error: float
    """Of the mean over prompts."""

    num_responses: int
    response_tokens_mean: float


async def evaluate(engine: RolloutEngine, inputs: Inputs, recipe: Recipe) -> Evaluation | None:
    """Answers and scores every held-out prompt; None where the recipe holds none out.

    Every evaluation of a run draws with the same chance, so that two of them differ by the policy alone.
    """
    heldout = inputs.prompts.heldout
    if not heldout:
        return None
    sampling = SamplingParams(
        temperature=recipe.evaluation.temperature,
        max_response_tokens=recipe.rollout.max_response_tokens,
        stop=recipe.rollout.stop,
        seed=recipe.run.seed,
    )
    groups = await generate_groups(engine, heldout, group_size=recipe.evaluation.group_size, sampling=sampling, step=0)
    groups = [score(group, inputs.reward_fn) for group in groups]
    means = np.asarray([group.rewards_N.mean() for group in groups if group.rewards_N is not None])
    lengths = [length for group in groups for length in group.response_lengths]
    return Evaluation(
        reward_mean=float(means.mean()),
        reward_standard_error=float(means.std(ddof=1) / np.sqrt(means.size)) if means.size > 1 else 0.0,
        num_responses=len(lengths),
        response_tokens_mean=float(np.mean(lengths)),
    )
