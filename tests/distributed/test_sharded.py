"""Fully sharded ranks against one process that holds the whole model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.trainer.tiny_policy import WORDS, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ratoon.distributed import (
    DataParallel,
    clip_gradients,
    full_weights,
    idle_layout,
    run_in_root,
    set_gradient_sync,
    shard_mesh,
    shard_model,
)
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, set_compile, set_recompute
from ratoon.types import Prompt, Response, RolloutGroup

Mode = Literal["none", "selective", "full"]

MAX_NORM = 0.05
"""Below the gradients' norm, so that clipping acts."""

MICROBATCHES: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1], [2], [3, 4]]],
    2: [[[0, 1], [2]], [[3, 4], []]],
    3: [[[0], [1, 2]], [[3, 4], []], [[], []]],
}
"""[rank][microbatch] the groups in it. With two ranks one is idle in the end, with three the last one always is."""


@dataclass(frozen=True, slots=True)
class Case:
    tied: bool = True
    dtype: torch.dtype = torch.float64
    recompute: Mode = "none"
    sync_last_only: bool = False
    reshard_after_forward: bool = True
    compiled: bool = False
    num_steps: int = 1


def groups() -> list[RolloutGroup]:
    """Five groups of ragged lengths; one has an empty response."""
    rng = np.random.default_rng(3)
    shapes = [(3, [4, 1, 7]), (1, [2]), (6, [5, 0, 3, 2]), (2, [9, 1]), (5, [1, 1, 1])]
    return [
        RolloutGroup(
            Prompt(f"p{index}", rng.integers(2, len(WORDS), P)),
            tuple(Response(rng.integers(2, len(WORDS), R)) for R in lengths),
        )
        for index, (P, lengths) in enumerate(shapes)
    ]


def build(case: Case) -> PreTrainedModel:
    model = set_recompute(attach(tiny_model(tied=case.tied, dtype=case.dtype)), case.recompute)
    return set_compile(model, "layers", backend="aot_eager") if case.compiled else model


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def build_sharded(case: Case, *, compute_dtype: torch.dtype | None = None) -> PreTrainedModel:
    model = build(case)
    shard_model(
        model,
        shard_mesh("cpu"),
        layers=layers_of(model),
        compute_dtype=compute_dtype or case.dtype,
        reshard_after_forward=case.reshard_after_forward,
    )
    return model


def loss_of(model: PreTrainedModel, layout: PackedLayout, *, is_idle: bool) -> Tensor:
    """A part of the step's sum: log-probs and entropies with weights of their own, over the step's token count."""

    def scores() -> tuple[Tensor, Tensor]:
        return forward_logprobs(model, layout, 0.8)

    logprobs_M, entropy_M = run_in_root(model, scores)
    # Of the token and its place in its sequence, so that cutting the step otherwise changes nothing.
    positions_M = layout.positions_T[layout.predictor_row_M]
    weights_M = torch.cos(torch.from_numpy(layout.target_M + 0.1 * positions_M))
    loss = ((logprobs_M + 0.3 * entropy_M) * weights_M.to(logprobs_M.dtype)).sum() / 37
    return loss * 0 if is_idle else loss


def backward_all(model: PreTrainedModel, case: Case, *, rank: int, world_size: int) -> None:
    all_groups = groups()
    planned = MICROBATCHES[world_size][rank]
    for index, chosen in enumerate(planned):
        set_gradient_sync(model, not case.sync_last_only or index == len(planned) - 1)
        layout = pack_groups([all_groups[group] for group in chosen]) if chosen else idle_layout()
        loss_of(model, layout, is_idle=not chosen).backward()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: PreTrainedModel, case: Case, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Gradients of the first step, each step's norm, and the weights after the last one."""
    optimizer = optimizer_of(model)
    grads: dict[str, Tensor] = {}
    norms: list[float] = []
    for _ in range(case.num_steps):
        optimizer.zero_grad()
        backward_all(model, case, rank=rank, world_size=world_size)
        if not grads:
            grads = whole_gradients(model)
        norms.append(clip_gradients(model, MAX_NORM))
        optimizer.step()
    return {"grads": grads, "norms": norms, "weights": dict(full_weights(model))}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
        for name, grad in grads.items()
    }


CASES: dict[int, list[Case]] = {
    2: [
        Case(num_steps=2),
        Case(tied=False, recompute="full"),
        Case(tied=False, dtype=torch.float32, sync_last_only=True, num_steps=2),
        Case(dtype=torch.float32, recompute="selective", reshard_after_forward=False),
        Case(recompute="full", sync_last_only=True, reshard_after_forward=False),
    ],
    3: [Case(recompute="full", num_steps=2), Case(tied=False, dtype=torch.float32)],
}


def train_cases(ranks: DataParallel, _: Path) -> list[dict[str, Any]]:
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    return [train(build_sharded(case), case, **place) for case in CASES[ranks.world_size]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {size: run_on_ranks(size, train_cases, tmp_path_factory.mktemp(f"{size}")) for size in CASES}


@pytest.mark.parametrize(
    ("world_size", "index"), [(size, index) for size, cases in CASES.items() for index in range(len(cases))]
)
def test_ranks_train_as_one_process_does(trained: dict[int, list[Any]], world_size: int, index: int):
    """Ragged groups split unequally, ranks with nothing to do, and a head whose weight is read outside of it."""
    case = CASES[world_size][index]
    expected = train(build(case), case)
    tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
    for by_case in trained[world_size]:
        got = by_case[index]
        assert got["grads"].keys() == expected["grads"].keys() and expected["norms"][0] > MAX_NORM
        for part in ("grads", "weights"):
            for name, value in expected[part].items():
                torch.testing.assert_close(got[part][name], value, rtol=tolerance, atol=tolerance, msg=name)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["norms"] == trained[world_size][0][index]["norms"], "bitwise the same on every rank"
