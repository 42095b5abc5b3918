"""The forecast of a step against packing and planning that very step, and the run folder's state against a run's."""

# Shape letters: P prompt tokens, R response tokens, N responses.

import fcntl
from typing import Any

import numpy as np
import pytest
import torch
from tests.loop.tiny_run import TinyRun
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ratoon.config import load_recipe
from ratoon.config.recipe import Recipe
from ratoon.layout import pack_groups
from ratoon.loop.dry_run import _forecast_step, _idle_expert_parameters, _typical_lengths
from ratoon.loop.mesh import MeshShape
from ratoon.loop.run_state import peek_run_folder
from ratoon.loop.stages import plan_updates
from ratoon.models import model_shape
from ratoon.planner import CostModel, useful_flops
from ratoon.types import ModelShape, Prompt, Response, RolloutGroup

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    intermediate_size=96,
    windows=(7, None),
)


def recipe_with(tiny: TinyRun, *overrides: str) -> Recipe:
    return load_recipe(tiny.recipe, overrides)


@pytest.mark.parametrize(("share_prompts", "num_minibatches"), [("true", 1), ("true", 3), ("false", 1)])
def test_forecast_is_that_of_the_packed_step(tiny: TinyRun, share_prompts: str, num_minibatches: int):
    lengths, N, R = [5, 5, 9, 14, 14, 23, 40], 5, 6
    recipe = recipe_with(
        tiny,
        f"--rollout.prompts_per_step={len(lengths)}",
        f"--rollout.group_size={N}",
        f"--algorithm.num_minibatches={num_minibatches}",
        f"--planner.share_prompts={share_prompts}",
        "--planner.max_rows_per_microbatch=60",
    )
    found = _forecast_step(recipe, lengths, SHAPE, R, MeshShape(num_ranks=1, degree=1))

    groups = [
        RolloutGroup(Prompt(index, np.full(P, 3)), tuple(Response(np.full(R, 2)) for _ in range(N)))
        for index, P in enumerate(lengths)
    ]
    updates = plan_updates(
        groups,
        num_updates=num_minibatches,
        num_ranks=1,
        max_rows_per_microbatch=60,
        cost=CostModel.from_shape(SHAPE, flops_per_s=1.0, seconds_per_microbatch=0.0),
        share_prompts=share_prompts == "true",
        keeps_prompts=True,
    )
    layouts = [
        [
            pack_groups([update.groups[index].select(responses) for index, responses in microbatch])
            for microbatch in rank
        ]
        for update in updates
        for rank in update.plan.assignment
    ]
    flat = [layout for rank in layouts for layout in rank]
    # Prompts that microbatches after the first of a kept run do not compute.
    again = [
        pack_groups([update.groups[update.plan.assignment[rank][number][0][0]].select([])])
        for update in updates
        for rank, runs in enumerate(update.plan.kept_runs)
        for start, stop in runs
        for number in range(start + 1, stop)
    ]
    assert bool(again) == (share_prompts == "true")
    alone = [pack_groups([group.select([index])]) for group in groups for index in range(N)]
    assert found.num_rows == sum(layout.num_rows for layout in flat) - sum(layout.num_rows for layout in again)
    assert found.num_logical_tokens == sum(layout.num_rows for layout in alone)
    assert found.dedup_ratio == pytest.approx(found.num_logical_tokens / found.num_rows)
    replicated, shared, saved = (sum(useful_flops(SHAPE, layout) for layout in of) for of in (alone, flat, again))
    assert found.flop_ratio == pytest.approx(replicated / (shared - saved), rel=1e-12)
    assert (found.flop_ratio == pytest.approx(1.0)) == (share_prompts == "false")
    assert found.num_microbatches == max(len(rank) for rank in layouts)
    assert found.largest_microbatch_rows == max(layout.num_rows for layout in flat) <= 60


def test_typical_lengths_are_spread_over_all():
    assert _typical_lengths([9, 1, 5, 3, 7], 5) == [1, 3, 5, 7, 9]
    assert _typical_lengths([4, 2], 5) == [2, 2, 4, 4, 4]
    assert np.mean(_typical_lengths(list(range(1000)), 8)) == pytest.approx(499.5, abs=1)


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_meet():
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3MoeConfig(**sizes)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert in_experts > 0
    assert _idle_expert_parameters(model_shape(model.config)) == in_experts * 6 // 8


def test_state_of_a_run_folder(tiny: TinyRun):
    """New, resumable, complete, another recipe's, somebody else's: and each look leaves it as it was."""
    recipe = recipe_with(tiny)
    assert peek_run_folder(recipe, has_heldout=True).status == "new"
    assert not tiny.run_dir.exists()
    assert tiny.train("--trainer.num_steps=2").status == 0
    files = {path: path.stat().st_mtime_ns for path in tiny.run_dir.rglob("*")}

    found = peek_run_folder(recipe, has_heldout=True)
    assert (found.status, found.num_steps_done, found.problem) == ("resumable", 2, None)
    assert found.checkpoint_bytes > 0
    assert peek_run_folder(recipe_with(tiny, "--trainer.num_steps=2"), has_heldout=True).status == "complete"
    other = peek_run_folder(recipe_with(tiny, "--trainer.learning_rate=1e-4"), has_heldout=True)
    assert other.status == "unusable"
    assert "trainer.learning_rate" in str(other.problem)
    with (tiny.run_dir / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = peek_run_folder(recipe, has_heldout=True)
    assert held.status == "unusable"
    assert "held by another process" in str(held.problem)
    assert {path: path.stat().st_mtime_ns for path in tiny.run_dir.rglob("*")} == files
