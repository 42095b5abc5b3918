"""Checkpoints of two ranks read by one process, and the other way round: masters and moments bit by bit."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.trainer.tiny_policy import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ratoon.distributed import DataParallel, clip_gradients, is_sharded, single_process
from ratoon.models import attach
from ratoon.models.sharding import shard_policy
from ratoon.trainer import MasterOptimizer
from ratoon.trainer.checkpoint import find_damage, load_checkpoint
from ratoon.trainer.shared_checkpoint import restore_optimizer, save_shared_checkpoint
from ratoon.types import UserError

Sharding = Literal["none", "full"]
DTYPES = (torch.bfloat16, torch.float32)


def build(dtype: torch.dtype, sharding: Sharding) -> tuple[PreTrainedModel, MasterOptimizer]:
    model = attach(tiny_model(tied=False, dtype=dtype))
    if sharding == "full":
        shard_policy(model)
    clip = partial(clip_gradients, model) if sharding == "full" else None
    optimizer = MasterOptimizer(model.parameters(), learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), clip=clip)
    return model, optimizer


def update(optimizer: MasterOptimizer) -> None:
    """One that needs no pass: gradients made of the masters, by elements alone."""
    for master in optimizer.masters:
        master.grad = master.detach() * 0.3 + 0.01
    optimizer.step(learning_rate=0.01, max_grad_norm=float("inf"))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """Masters and moments by the parameter's name, uncut; weights in the dtype of the model's folder."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        master = optimizer.master_of[parameter]
        found[f"{name} master"] = whole(master)
        for key, value in optimizer.adamw.state[master].items():
            found[f"{name} {key}"] = whole(value)
    return found


def save(
    folder: Path, step: int, model: PreTrainedModel, optimizer: MasterOptimizer, ranks: DataParallel, **parts: Any
) -> Path:
    return save_shared_checkpoint(
        folder,
        step,
        model=model,
        optimizer=optimizer,
        ranks=ranks,
        **{
            "model_writer": lambda partial: (partial / "weights").write_text("of the model"),
            "model_bytes": 10,
            "state": {"rng": torch.arange(3)},
            "position": {"prompts": 7},
            "keep_last": 1,
        }
        | parts,
    )


def write(ranks: DataParallel, folder: Path, sharding: Sharding) -> list[dict[str, Tensor]]:
    """Of each dtype: the state that was saved after two updates; before it an older checkpoint, which goes."""
    states: list[dict[str, Tensor]] = []
    for dtype in DTYPES:
        model, optimizer = build(dtype, sharding)
        assert is_sharded(model) == (sharding == "full")
        for step in (1, 2):
            update(optimizer)
            save(folder / str(dtype), step, model, optimizer, ranks)
        states.append(state_of(model, optimizer))
    return states


def read(ranks: DataParallel, folder: Path, sharding: Sharding) -> list[dict[str, Tensor]]:
    states: list[dict[str, Tensor]] = []
    for dtype in DTYPES:
        model, optimizer = build(dtype, sharding)
        saved = load_checkpoint(folder / str(dtype) / "step-000002", read_bytes=ranks.is_main)
        if dtype == torch.float32:  # a folder's weights are these; here another model stands for it
            load_weights(model, read_weights(folder))
        restore_optimizer(saved, model=model, optimizer=optimizer, ranks=ranks)
        assert saved.position == {"prompts": 7} and torch.equal(saved.state["rng"], torch.arange(3))
        states.append(state_of(model, optimizer))
        for parameter, master in optimizer.master_of.items():
            assert torch.equal(whole(parameter), whole(master).to(parameter.dtype))
        update(optimizer)
    return states


def read_weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    from ratoon.distributed.sharded import cut_like

    for name, parameter in model.named_parameters():
        parameter.copy_(cut_like(weights[name], parameter))


def two_write_sharded(ranks: DataParallel, folder: Path) -> list[dict[str, Tensor]]:
    states = write(ranks, folder, "full")
    if ranks.is_main:
        keep_weights(folder, states[1])
    ranks.barrier()
    assert [path.name for path in (folder / str(DTYPES[0])).iterdir()] == ["step-000002"]
    again = read(ranks, folder, "full")
    assert all(torch.equal(again[i][name], states[i][name]) for i in range(2) for name in states[i])
    return states


def two_read_sharded(ranks: DataParallel, folder: Path) -> list[dict[str, Tensor]]:
    return read(ranks, folder, "full")


def keep_weights(folder: Path, state: dict[str, Tensor]) -> None:
    suffix = " master"
    torch.save({n.removesuffix(suffix): t for n, t in state.items() if n.endswith(suffix)}, folder / "weights.pt")


def assert_same(got: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype and torch.equal(mine[name], value), name


def failing_writes(ranks: DataParallel, folder: Path) -> list[str]:
    """Where the first rank's model, or the second one's shards, cannot be written: what each rank hears."""
    folder = folder / "checkpoints"
    model, optimizer = build(torch.float32, "full")
    update(optimizer)
    save(folder, 1, model, optimizer, ranks)
    heard: list[str] = []

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for attempt in ("model", "shards"):
        writer = {"model_writer": full_disk} if attempt == "model" else {}
        with pytest.MonkeyPatch.context() as patch:
            if attempt == "shards" and ranks.rank == 1:
                patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full_disk)
            with pytest.raises((UserError, RuntimeError)) as error:
                save(folder, 2, model, optimizer, ranks, **writer)
        heard.append(f"{type(error.value).__name__}: {error.value}")
    ranks.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-000001"], "nothing half written stays"
    return heard


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_on_ranks(2, two_write_sharded, folder)[0]


def test_one_process_reads_what_two_wrote(sharded: tuple[Path, list[dict[str, Tensor]]]):
    folder, wanted = sharded
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wanted[0].values()), "masters are finer"
    assert_same(read(single_process(), folder, "none"), wanted)


def test_two_ranks_read_what_one_process_wrote(tmp_path: Path):
    wanted = write(single_process(), tmp_path, "none")
    keep_weights(tmp_path, wanted[1])
    for got in run_on_ranks(2, two_read_sharded, tmp_path):
        assert_same(got, wanted)


def test_the_manifest_covers_every_rank_s_part(sharded: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path):
    checkpoint = shutil.copytree(sharded[0] / str(DTYPES[0]) / "step-000002", tmp_path / "step-000002")
    assert find_damage(checkpoint) is None
    (part,) = checkpoint.rglob("__1_0.distcp")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert "__1_0.distcp has other contents" in str(find_damage(checkpoint))


def test_a_rank_that_cannot_write_leaves_no_checkpoint(tmp_path: Path):
    first, second = run_on_ranks(2, failing_writes, tmp_path / "run")
    assert first[0].startswith("UserError: the disk filled up while checkpoint step-000002")
    assert second[0].startswith("OtherRankError: rank 0: UserError: the disk filled up")
    assert all("No space left" in text for text in (first[1], second[1]))
