"""Pools of reward workers for tests, and groups to score."""

from pathlib import Path
from typing import Any

import numpy as np

from ratoon.rewards import RewardConfig, RewardPool
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup

RUNS_THE_RESPONSE = """
def score(response):
    scope = {"__name__": "response"}
    exec(compile(response, "response.py", "exec"), scope)
    return scope["value"]
"""
"""A reward function that does what the response says: any fault can be had for the asking."""


def open_pool(folder: Path, source: str | None = None, **settings: Any) -> RewardPool:
    """A pool of one worker, of the function `score` in `source` unless the settings name another."""
    values: dict[str, Any] = {"num_workers": 1, **settings}
    if source is not None:
        (folder / "mine.py").write_text(source)
        if "components" not in values:
            values.setdefault("function", "python:mine.py:score")
    return RewardPool(RewardConfig.model_validate(values), base_dir=folder, max_response_tokens=100)


def group_of(*texts: str, id: str = "rows.jsonl:7", answer: str | None = "4", **metadata: Any) -> RolloutGroup:
    prompt = Prompt(id, np.array([1]), "2+2=", answer, metadata)
    return RolloutGroup(prompt, tuple(Response(np.array([1]), text=text) for text in texts))


def cut(group: RolloutGroup, *indices: int) -> RolloutGroup:
    """The group with some of its responses ended by the token budget."""
    return RolloutGroup(
        group.prompt,
        tuple(
            Response(
                response.token_ids,
                text=response.text,
                finish_reason=FinishReason.LENGTH if index in indices else FinishReason.EOS,
            )
            for index, response in enumerate(group.responses)
        ),
    )


def rewards_of(group: RolloutGroup) -> list[float]:
    assert group.rewards_N is not None
    return group.rewards_N.tolist()


def scored(pool: RewardPool, *texts: str, answer: str | None = "4", **metadata: Any) -> list[float]:
    """Rewards of one group of these responses."""
    (group,) = pool.score_now([group_of(*texts, answer=answer, **metadata)]).groups
    return rewards_of(group)
