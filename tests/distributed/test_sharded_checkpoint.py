"""Checkpoints that two ranks write, and one and three read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_sharded import Case, build, build_sharded, optimizer_of
from tests.trainer.tiny_policy import tiny_model
from torch import Tensor, nn
from torch.optim import Optimizer

from ratoon.distributed import DataParallel, clip_gradients, full_weights, load_sharded, save_sharded
from ratoon.types import UserError

CASE = Case(dtype=torch.float32, num_steps=2)


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and every tensor of the optimizer's state, uncut, by name."""
    from torch.distributed.tensor import DTensor

    state: dict[str, Tensor] = {name: value.clone() for name, value in full_weights(model)}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return state


def some_update(model: nn.Module, optimizer: Optimizer) -> None:
    """One that needs no pass: gradients made of the weights."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    clip_gradients(model, 10.0)
    optimizer.step()
    optimizer.zero_grad()


def write(ranks: DataParallel, folder: Path) -> list[dict[str, Any]]:
    """Before any update; then after two: the states that were written, and what a third update makes of it."""
    model = build_sharded(CASE)
    optimizer = optimizer_of(model)
    save_sharded(folder / "fresh", model, optimizer)
    assert not optimizer.state, "saving made up moments, and the first update would count as the second"
    fresh = whole_state(model, optimizer)
    some_update(model, optimizer)
    some_update(model, optimizer)
    save_sharded(folder / "trained", model, optimizer)
    trained = whole_state(model, optimizer)
    some_update(model, optimizer)
    return [fresh, trained, whole_state(model, optimizer)]


def read(model: nn.Module, folder: Path) -> list[dict[str, Any]]:
    """As `write` returns, into a model of other weights whose optimizer has state of its own."""
    optimizer = optimizer_of(model)
    some_update(model, optimizer)
    load_sharded(folder / "trained", model, optimizer)
    trained = whole_state(model, optimizer)
    some_update(model, optimizer)
    third = whole_state(model, optimizer)
    load_sharded(folder / "fresh", model, optimizer)
    return [whole_state(model, optimizer), trained, third]


def read_sharded(_: DataParallel, folder: Path) -> list[dict[str, Any]]:
    return read(build_sharded(CASE), folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_on_ranks(2, write, folder)[0]


def assert_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name


def test_one_process_reads_what_two_ranks_wrote(written: tuple[Path, list[dict[str, Any]]]):
    folder, wanted = written
    assert len(wanted[1]) == 4 * len(wanted[0]), "weights, two moments and a step count each"
    got = read(build(CASE), folder)
    assert_same(got[:2], wanted[:2])
    for name, value in wanted[2].items():
        # The norm is summed in another order.
        torch.testing.assert_close(got[2][name], value, rtol=1e-6, atol=1e-7)


def test_three_ranks_read_what_two_wrote(written: tuple[Path, list[dict[str, Any]]]):
    folder, wanted = written
    for got in run_on_ranks(3, read_sharded, folder):
        assert_same(got[:2], wanted[:2])
        for name, value in wanted[2].items():
            torch.testing.assert_close(got[2][name], value, rtol=1e-6, atol=1e-7)


def test_another_model_is_refused_by_name(written: tuple[Path, list[dict[str, Any]]]):
    folder, _ = written
    untied = tiny_model(tied=False)
    with pytest.raises(UserError, match=r"of another model: 1 tensors .* first lm_head.weight"):
        load_sharded(folder / "trained", untied, optimizer_of(untied))


def test_state_of_a_weight_that_no_longer_trains_is_refused(written: tuple[Path, list[dict[str, Any]]]):
    folder, _ = written
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.lm_head.parameters())
    with pytest.raises(UserError, match="does not train"):
        load_sharded(folder / "trained", model, optimizer)


def test_an_unfinished_folder_is_refused(tmp_path: Path):
    """prime-rl#1712: resume took a checkpoint that was still being written."""
    (tmp_path / "__0_0.distcp").write_bytes(b"half")
    model = tiny_model()
    with pytest.raises(UserError, match="did not end"):
        load_sharded(tmp_path, model, optimizer_of(model))
