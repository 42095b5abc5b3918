"""Steps of a sharded policy on two ranks against those of one process that holds the whole model (float64)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.trainer.tiny_policy import WORDS, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import (
    DataParallel,
    SequenceGroup,
    clip_gradients,
    full_weights,
    is_sharded,
    single_process,
)
from ratoon.loop.stages import plan_updates
from ratoon.models import attach, set_sequence_parallel
from ratoon.models.sharding import refresh_copy, sampling_copy, shard_policy
from ratoon.planner import CostModel
from ratoon.trainer import MasterOptimizer, StepResult, Trainer, Update, frozen_reference
from ratoon.types import Prompt, Response, RolloutGroup

MAX_GRAD_NORM = 0.05
"""Below the norms here, so that clipping acts."""

TIMES = ("update_s", "num_microbatches")
"""What the number of ranks may change."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    settings: dict[str, Any]
    num_groups: int = 5
    """One: the other rank has nothing to score in any microbatch."""


CASES = (
    Case("plain", {"name": "grpo"}),
    Case("two updates", {"name": "dapo", "num_minibatches": 2, "clip_low": 0.01, "clip_high": 0.02}),
    Case("k3", {"name": "grpo", "kl_coefficient": 0.3}),
    Case("one rank idle", {"name": "grpo", "kl_coefficient": 0.3, "num_minibatches": 2}, num_groups=1),
)


def groups(num_groups: int) -> tuple[RolloutGroup, ...]:
    rng = np.random.default_rng(3)
    shapes = [(3, [4]), (1, [2, 5]), (6, [5, 0, 3, 2]), (2, [9, 1]), (5, [1, 1, 1])][:num_groups]

    def response(R: int) -> Response:
        return Response(rng.integers(2, len(WORDS), R), rollout_logprobs=-3 * rng.random(R, np.float32))

    return tuple(
        RolloutGroup(
            Prompt(f"p{index}", rng.integers(2, len(WORDS), P)),
            tuple(response(R) for R in lengths),
            advantages_N=rng.normal(0.3, 1.0, len(lengths)),
        )
        for index, (P, lengths) in enumerate(shapes)
    )


def plan(case: Case, num_updates: int, num_ranks: int) -> Sequence[Update]:
    return plan_updates(
        groups(case.num_groups),
        num_updates=num_updates,
        num_ranks=num_ranks,
        max_rows_per_microbatch=20,
        cost=CostModel(),
    )


def make_trainer(
    case: Case, ranks: DataParallel, *, is_cut: bool | None = None, group: SequenceGroup | None = None
) -> Trainer:
    """is_cut: None where there are several ranks. group: those that hold each microbatch together."""
    models = [attach(tiny_model(tied=False, dtype=torch.float64, seed=seed)) for seed in (0, 1)]
    model, other = (set_sequence_parallel(each, group) for each in models)
    is_cut = ranks.world_size > 1 if is_cut is None else is_cut
    if is_cut:
        shard_policy(model)
        shard_policy(other.requires_grad_(False))
    clip = partial(clip_gradients, model) if is_cut else None
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.1, betas=(0.9, 0.95), clip=clip)
    algorithm = AlgorithmConfig(**case.settings)
    return Trainer(
        model,
        optimizer,
        algorithm=algorithm,
        temperature=0.7,
        max_grad_norm=MAX_GRAD_NORM,
        data_parallel=ranks,
        reference=frozen_reference(other, 0.7) if algorithm.needs_reference else None,
        max_response_tokens=9,
    )


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_weights(model)}


def run(
    case: Case, ranks: DataParallel, *, is_cut: bool | None = None, group: SequenceGroup | None = None
) -> dict[str, Any]:
    """Two supervised updates, two steps, and the divergences in between."""
    trainer = make_trainer(case, ranks, is_cut=is_cut, group=group)
    found: dict[str, Any] = {"kl": []}
    num_data_ranks = trainer.sequence_group.num_data_ranks
    (whole,) = plan(case, 1, num_data_ranks)
    found["supervised"] = [trainer.supervised_step(whole, learning_rate=0.01) for _ in range(2)]
    found["after supervised"] = weights(trainer.model)
    results: list[StepResult] = []
    for _ in range(2):
        results.append(trainer.step(plan(case, trainer.algorithm.num_minibatches, num_data_ranks), learning_rate=0.01))
        if trainer.algorithm.needs_reference:
            found["kl"] += [torch.from_numpy(kl_N) for kl_N in trainer.kl_to_reference(whole)]
    found["results"] = [
        {name: value for name, value in asdict(result).items() if name not in TIMES} for result in results
    ]
    found["weights"] = weights(trainer.model)
    return found


def run_cases(ranks: DataParallel, _: Path) -> list[dict[str, Any]]:
    return [run(case, ranks) for case in CASES]


def copies(ranks: DataParallel, _: Path) -> list[Any]:
    """Of a bfloat16 policy: the copy's weights, before and after a step, and those of the policy, rounded."""
    case = CASES[0]
    whole = attach(tiny_model(dtype=torch.bfloat16))
    copied = sampling_copy(whole)
    model = shard_policy(whole)
    before = {name: tensor.clone() for name, tensor in copied.named_parameters()}
    optimizer = MasterOptimizer(
        model.parameters(),
        learning_rate=1.0,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        clip=partial(clip_gradients, model),
    )
    trainer = Trainer(
        model,
        optimizer,
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        max_grad_norm=1.0,
        data_parallel=ranks,
    )
    refresh_copy(copied, model)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in copied.named_parameters())
    trainer.step(plan(case, 1, ranks.world_size), learning_rate=0.01)
    refresh_copy(copied, model)
    assert is_sharded(model) and not is_sharded(copied)
    return [unchanged, before, dict(copied.named_parameters()), dict(full_weights(model, torch.bfloat16))]


def work(ranks: DataParallel, folder: Path) -> list[Any]:
    return [run_cases(ranks, folder), copies(ranks, folder)]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_on_ranks(2, work, tmp_path_factory.mktemp("trainer"))


def assert_same(part: str, got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{part}: {text}")


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_two_ranks_step_as_one_process(on_two_ranks: list[Any], index: int):
    expected = run(CASES[index], single_process())
    for cases, _ in on_two_ranks:
        got = cases[index]
        assert got.keys() == expected.keys()
        for part in expected:
            assert_same(part, got[part], expected[part])


def test_the_sampling_copy_follows_every_rank_alike(on_two_ranks: list[Any]):
    copied = [found for _, found in on_two_ranks]
    for unchanged, before, after, wanted in copied:
        assert unchanged
        assert set(wanted) == set(before) == set(after)
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)
        assert any(not torch.equal(before[name], after[name]) for name in wanted)
    assert all(torch.equal(copied[0][2][name], copied[1][2][name]) for name in copied[0][2])
