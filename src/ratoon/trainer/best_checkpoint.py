"""Which checkpoint of a run has the best held-out reward.

Nothing is written down for it: the evaluations stand in metrics.jsonl and the checkpoints on disk, so a run that was
killed at any moment and resumed finds the same best one. Evaluations of one run draw alike; one whose `[evaluation]`
table was changed on the way compares unlike figures.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from ratoon.metrics import MetricsRow, read_metrics
from ratoon.trainer.checkpoint import checkpoint_name, find_damage
from ratoon.types.errors import UserError

_METRICS, _CHECKPOINTS = "metrics.jsonl", "checkpoints"  # of a run's folder


def best_step(run: Path, *, saving: int | None = None) -> int | None:
    """The step with the highest held-out reward that a whole checkpoint holds, the earliest of equals; None if none.

    saving: a step that counts as one that has a checkpoint, because it is about to be written.
    Step 0 never counts: the model that a run began with is no result of it.
    """
    for step in _ranked(read_metrics(run / _METRICS)):
        if step == saving or find_damage(run / _CHECKPOINTS / checkpoint_name(step), read_bytes=False) is None:
            return step
    return None


def best_checkpoint(run: Path, *, warn: Callable[[str], object] = warnings.warn) -> Path:
    """The checkpoint with the highest held-out reward, verified byte by byte; `warn` hears of better, damaged ones.

    Raises UserError if no step of the run was both evaluated and saved.
    """
    if not (run / _METRICS).is_file():
        raise UserError(f"{run} is no run folder (it has no {_METRICS}); give a run folder such as runs/NAME")
    for step in _ranked(read_metrics(run / _METRICS)):
        path = run / _CHECKPOINTS / checkpoint_name(step)
        if not path.exists():
            continue
        damage = find_damage(path)
        if damage is None:
            return path
        warn(f"checkpoint {path} is damaged and was passed over: {damage}")
    raise UserError(
        f"{run} holds no checkpoint that was evaluated; hold prompts out (data.num_heldout), and set "
        "evaluation.every_steps and evaluation.keep_best before training, or take the newest checkpoint"
    )


def _ranked(rows: Sequence[MetricsRow]) -> list[int]:
    """Evaluated steps after the first, the best one first and the earliest of equals before the others."""
    rewards: dict[int, float] = {}
    for row in rows:
        reward = row.values.get("reward_mean")
        if row.phase == "evaluate" and row.step > 0 and isinstance(reward, int | float) and not math.isnan(reward):
            rewards[row.step] = reward
    return sorted(rewards, key=lambda step: (-rewards[step], step))
