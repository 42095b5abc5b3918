"""Fully sharded ranks against one process that holds the whole model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.trainer.tiny_policy import WORDS, tiny_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ratoon.distributed import (
    DataParallel,
    clip_gradients,
    full_weights,
    idle_layout,
    run_in_root,
    shard_mesh,
    shard_model,
)
from ratoon.distributed.sharded import local_part
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, set_compile, set_recompute
from ratoon.models.forest import Forest
from ratoon.models.forward import score_forest
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
    reshard_after_forward: bool = True
    compiled: bool = False
    adapted: bool = False
    """Only some weights of each layer train, as with adapters; nothing outside of the layers does."""

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
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.adapted or "q_proj" in name or "down_proj" in name)
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
    loss = ((logprobs_M + 0.3 * entropy_M) * weights_M.to(logprobs_M)).sum() / 37
    return loss * 0 if is_idle else loss


def backward_all(model: PreTrainedModel, case: Case, *, rank: int, world_size: int) -> None:
    all_groups = groups()
    for chosen in MICROBATCHES[world_size][rank]:
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
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
        for name, grad in grads.items()
    }


CASES: dict[int, list[Case]] = {
    2: [
        Case(num_steps=2),
        Case(tied=False, recompute="full"),
        Case(tied=False, dtype=torch.float32, num_steps=2),
        Case(dtype=torch.float32, recompute="selective", reshard_after_forward=False),
        Case(recompute="full", reshard_after_forward=False),
        Case(adapted=True),
        Case(adapted=True, recompute="full"),
    ],
    3: [Case(recompute="full", num_steps=2), Case(tied=False, dtype=torch.float32)],
}


def gradient_part(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)


def held_bytes(ranks: DataParallel, _: Path) -> list[int]:
    """After an update: bytes of weights and moments on this rank, and of the largest gradient that it held."""
    case = Case(dtype=torch.float32)
    model = build_sharded(case)
    optimizer = optimizer_of(model)
    backward_all(model, case, rank=ranks.rank, world_size=ranks.world_size)
    num_grads = sum(gradient_part(parameter).numel() for parameter in model.parameters())
    clip_gradients(model, MAX_NORM)
    optimizer.step()
    parts = [local_part(parameter) for parameter in model.parameters()]
    moments = [local_part(state[key]) for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [sum(part.untyped_storage().nbytes() for part in parts + moments), 4 * num_grads]


def layers_gathered_at_once(ranks: DataParallel, _: Path) -> int:
    """The largest number of layers whose whole weights stand registered while one computes, recomputation included."""
    model = build_sharded(Case(recompute="full"))
    layers = layers_of(model)
    seen: list[int] = []

    def count(*_: Any) -> None:
        seen.append(sum(not isinstance(next(layer.parameters()), DTensor) for layer in layers))

    for layer in layers:
        # Inside of the layer: recomputation stops before it ends.
        layer.get_submodule("mlp").register_forward_pre_hook(count)
    backward_all(model, Case(), rank=ranks.rank, world_size=ranks.world_size)
    assert len(seen) >= 2 * len(layers) * len(MICROBATCHES[ranks.world_size][0]), "recomputation did not come by"
    return max(seen)


def direct_calls(_: DataParallel, __: Path) -> list[str]:
    """What calling a part of a sharded model says: before its first pass, and after one."""
    model = build_sharded(Case())
    layout = pack_groups(groups()[:2])
    messages: list[str] = []
    for _round in range(2):
        with pytest.raises(ValueError, match="not gathered") as error:
            score_forest(model, Forest.build(layout, device="cpu"))
        messages.append(str(error.value))
        with torch.no_grad():
            loss_of(model, layout, is_idle=False)
    return messages


def passes_between_updates(_: DataParallel, __: Path) -> list[Tensor]:
    """Losses: at first, after the weights were halved in between, and of a whole model with halved weights."""
    model, whole = build_sharded(Case(tied=False)), build(Case(tied=False))
    layout = pack_groups(groups()[:2])
    losses: list[Tensor] = []
    with torch.no_grad():
        for halve in (False, True):
            for parameter in [*model.parameters(), *whole.parameters()] if halve else []:
                parameter.mul_(0.5)
            losses.append(loss_of(model, layout, is_idle=False))
        losses.append(loss_of(whole, layout, is_idle=False))
    return losses


def mixed_precision(ranks: DataParallel, _: Path) -> dict[str, Any]:
    """Gradients of a bfloat16 model that computes in bfloat16, and the dtypes met."""
    case = Case(dtype=torch.bfloat16, tied=False)
    model = build_sharded(case)
    dtypes = [str(next(model.parameters()).dtype), str(run_in_root(model, lambda: model.lm_head.weight).dtype)]
    model = build_sharded(case)
    backward_all(model, case, rank=ranks.rank, world_size=ranks.world_size)
    grads = whole_gradients(model)
    sent = dict(full_weights(model, torch.bfloat16))
    return {"dtypes": dtypes, "grads": grads, "sent": sent}


def all_idle(ranks: DataParallel, _: Path) -> dict[str, Tensor]:
    model = build_sharded(Case(dtype=torch.bfloat16))
    loss_of(model, idle_layout(), is_idle=True).backward()
    return whole_gradients(model)


def not_finite(ranks: DataParallel, _: Path) -> list[Any]:
    """One rank's gradient has an infinite element: the norm, and the smallest and largest of the others'."""
    model = build_sharded(Case())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if ranks.rank == 1:
        gradient_part(next(model.parameters()))[0] = torch.inf
    norm = clip_gradients(model, 1.0)
    rest = torch.cat([gradient_part(p).flatten() for p in list(model.parameters())[1:]])
    return [norm, rest.min().item(), rest.max().item()]


def misuse(_: DataParallel, __: Path) -> list[str]:
    model, mesh = build_sharded(Case()), shard_mesh("cpu")
    other = build(Case())
    messages: list[str] = []
    for wrong, layers in ((model, layers_of(model)), (other, layers_of(model)), (other, [])):
        with pytest.raises(ValueError, match=r"shard|layers") as error:
            shard_model(wrong, mesh, layers=layers, compute_dtype=torch.float64)
        messages.append(str(error.value))
    return messages


def compiled(ranks: DataParallel, _: Path, recompute: Mode = "none") -> dict[str, Any]:
    case = Case(dtype=torch.float32, recompute=recompute, num_steps=2, compiled=True)
    result = train(build_sharded(case), case, rank=ranks.rank, world_size=ranks.world_size)
    return result | {"num_graphs": counters["stats"]["unique_graphs"]}


def compiled_with_all_recompute_modes(ranks: DataParallel, folder: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for recompute in get_args(Mode):
        torch._dynamo.reset()
        counters.clear()
        results.append(compiled(ranks, folder, recompute))
    return results


FACTS = (
    held_bytes,
    layers_gathered_at_once,
    direct_calls,
    passes_between_updates,
    mixed_precision,
    all_idle,
    not_finite,
    misuse,
)


def find_facts(ranks: DataParallel, folder: Path) -> dict[str, Any]:
    return {fact.__name__: fact(ranks, folder) for fact in FACTS}


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


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(2, find_facts, tmp_path_factory.mktemp("facts"))


def test_no_rank_holds_more_than_its_part(facts: list[dict[str, Any]]):
    model = tiny_model()
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    longest_row = sum(parameter[0].numel() for parameter in model.parameters())  # each may be cut unevenly
    for fact in facts:
        held, grads = fact["held_bytes"]
        assert held <= 3 * 4 * (num_weights / 2 + longest_row) and grads <= 4 * (num_weights / 2 + longest_row)
        assert held < 0.6 * 3 * 4 * num_weights
    assert sum(fact["held_bytes"][1] for fact in facts) == 4 * num_weights


def test_one_layer_is_gathered_at_a_time(facts: list[dict[str, Any]]):
    assert [fact["layers_gathered_at_once"] for fact in facts] == [1, 1]


def test_a_part_called_by_itself_is_refused(facts: list[dict[str, Any]]):
    """As torch has it, the first such call breaks the model for good, and later ones speak of mixed tensors."""
    for fact in facts:
        assert all("run_in_root" in message and "Embedding" in message for message in fact["direct_calls"])


def test_a_pass_without_gradients_leaves_no_old_weights(facts: list[dict[str, Any]]):
    for fact in facts:
        before, after, expected = fact["passes_between_updates"]
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
        assert abs(before - after) > 1e-3


def test_sixteen_bits_compute_and_thirty_two_are_kept(facts: list[dict[str, Any]]):
    exact = build(Case(dtype=torch.bfloat16, tied=False)).float()
    backward_all(exact, Case(dtype=torch.float32), rank=0, world_size=1)
    for fact in facts:
        found = fact["mixed_precision"]
        assert found["dtypes"] == ["torch.float32", "torch.bfloat16"]
        for name, parameter in exact.named_parameters():
            assert parameter.grad is not None and found["grads"][name].dtype == torch.float32
            error = (found["grads"][name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 0.05, f"{name}: {error:.3f}"
            assert torch.equal(found["sent"][name], parameter.detach().bfloat16())


def test_ranks_with_nothing_to_do_add_exact_zeros(facts: list[dict[str, Any]]):
    """verl#5591: a rank that skips its pass leaves the others waiting."""
    names = {name for name, _ in tiny_model().named_parameters()}
    for fact in facts:
        assert fact["all_idle"].keys() == names
        assert not any(grad.any() for grad in fact["all_idle"].values())


def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks_and_scaled_by_none(facts: list[dict[str, Any]]):
    assert [fact["not_finite"] for fact in facts] == [[np.inf, 1.0, 1.0]] * 2


def test_misuse_is_refused(facts: list[dict[str, Any]]):
    already, strangers, none = facts[0]["misuse"]
    assert "is sharded already" in already and "got none" in none
    assert "must be modules of the Qwen3ForCausalLM" in strangers


def test_a_model_that_is_not_sharded_needs_none_of_it():
    model = build(Case())
    loss_of(model, pack_groups(groups()[:1]), is_idle=False).backward()
    parameters = list(model.parameters())
    wanted = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    assert clip_gradients(model, 1e9) == pytest.approx(wanted.item(), rel=1e-12)
    assert [value.data_ptr() for _, value in full_weights(model)] == [p.data_ptr() for p in parameters]


@pytest.mark.full
def test_compiled_layers_train_alike(tmp_path: Path):
    plain = Case(dtype=torch.float32, num_steps=2)
    expected = train(build(plain), plain)
    for by_mode in run_on_ranks(2, compiled_with_all_recompute_modes, tmp_path):
        for got in by_mode:
            assert got["num_graphs"] > 0, "nothing was compiled"
            for name, value in expected["weights"].items():
                torch.testing.assert_close(got["weights"][name], value, rtol=1e-5, atol=1e-5, msg=name)
