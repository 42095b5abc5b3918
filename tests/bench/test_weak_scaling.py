"""`ratoon bench weak-scaling`: its rows, compiled layers of a cut model, and what it says of wrong gradients."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ratoon.bench import weak_scaling
from ratoon.bench.policy_update.cases import make_group
from ratoon.bench.policy_update.microbatches import Microbatch, pack_update
from ratoon.bench.policy_update.random_model import build_model
from ratoon.bench.policy_update.variants import Variant
from ratoon.bench.weak_scaling import CASES, WAYS, bench_weak_scaling
from ratoon.distributed import DataParallel, reshard, shard_mesh, shard_model
from ratoon.models import set_compile, set_recompute
from ratoon.models.sharding import decoder_layers
from ratoon.types import UserError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks with GPUs measure what is too large for tests")

CPU = torch.device("cpu")


@pytest.mark.full
def test_rows_under_torchrun(tmp_path: Path):
    results = tmp_path / "rows.jsonl"
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "ratoon.cli.main", "bench", "weak-scaling", "--steps", "3", "--results", str(results)]
    done = subprocess.run(
        [*launch, *command, "--ways", "selective/none/reshard/1,none/none/keep/2"],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("efficiency") == 2, "one rank speaks"
    first, second = (json.loads(line) for line in results.read_text().splitlines())
    case = CASES["tiny"]
    for row in (first, second):
        assert row["bench"] == "weak-scaling" and row["impl"] == "auto" and row["layout"] == "shared"
        assert row["case"] == {"model": "tiny-Qwen3", "P": case.P, "R": case.R, "N": case.N, "groups": 1, "gpus": 2}
        assert row["num_rows"] == 57 + 6 * 19 and row["repeats"] == 3 and row["compile"] is False
        assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
        assert row["alone_step_min_s"] <= row["alone_step_s"] <= row["alone_step_max_s"]
        assert row["efficiency"] == pytest.approx(row["alone_step_s"] / row["step_s"])
        assert row["slice_gradient_gap"] < 1e-9 and row["gradient_gap_with_queries_and_keys"] < 1e-4
        assert row["command"].startswith("torchrun --nproc-per-node 2 -m ratoon.cli.main bench weak-scaling")
    settings = [tuple(row[name] for name in ("recompute", "reshard", "prefetch")) for row in (first, second)]
    assert settings == [("selective", True, 1), ("none", False, 2)]


def bench(ranks: DataParallel, way: str) -> Any:
    return bench_weak_scaling(
        ranks, cases=["tiny"], ways=[way], num_steps=1, command="", say=lambda _: None, compile_backend="aot_eager"
    )


def mean_of_ranks(unit: FSDPModule, _: float) -> None:
    HONEST["set_gradient_divide_factor"](unit, 2.0)


def left_unsummed(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    HONEST["shard_model"](model, *args, **kwargs)
    assert isinstance(model, FSDPModule), "shard_model has made it one"
    model.set_requires_gradient_sync(False)


def another_group(microbatch: Microbatch, model: PreTrainedModel) -> Tensor:
    """One rank does its work twice."""
    is_second = torch.distributed.get_rank() == 1 and isinstance(model, FSDPModule)
    weights_M = microbatch.weights_M * (2 if is_second else 1)
    return HONEST["backward"](replace(microbatch, weights_M=weights_M), model)


HONEST: dict[str, Callable[..., Any]] = {
    "set_gradient_divide_factor": FSDPModule.set_gradient_divide_factor,
    "shard_model": shard_model,
    "backward": Microbatch.backward,
}
WRONG: list[tuple[object, str, Callable[..., Any]]] = [
    (FSDPModule, "set_gradient_divide_factor", mean_of_ranks),
    (weak_scaling, "shard_model", left_unsummed),
    (Microbatch, "backward", another_group),
]


def bench_wrongly(ranks: DataParallel, _: Path) -> list[list[str]]:
    """For each wrong way, why it failed: on the slice, and where the slice lets all through."""
    found: list[list[str]] = []
    for owner, attribute, wrong in WRONG:
        found.append([])
        for bound in (weak_scaling.SLICE_GAP, torch.inf):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, attribute, wrong)
                patch.setattr(weak_scaling, "SLICE_GAP", bound)
                outcome = bench(ranks, "none/none/reshard/1")
            assert not outcome.rows
            found[-1] += [one.reason for one in outcome.failed]
    return found


@pytest.mark.full
def test_wrong_gradients_get_no_time(tmp_path: Path):
    for by_wrong in run_on_ranks(2, bench_wrongly, tmp_path):
        for on_slice, at_full_size in by_wrong:
            assert "on a slice" in on_slice and "at full size" in at_full_size


def compiled_rows(ranks: DataParallel, _: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for way in ("selective/layers/reshard/1", "full/layers/keep/2"):
        before = counters["stats"]["unique_graphs"]
        (row,) = bench(ranks, way).rows
        rows.append({**row.figures, "graphs": counters["stats"]["unique_graphs"] - before})
    return rows


@pytest.mark.full
def test_the_first_step_compiles_and_no_other_does(tmp_path: Path):
    """Layers by themselves share one graph, and so do those of a cut model. Where whole layers are computed again in
    backward, FSDP hands them their inputs otherwise than in forward, which takes one more."""
    for rows in run_on_ranks(2, compiled_rows, tmp_path):
        assert [row["graphs"] for row in rows] == [2, 3]
        for row in rows:
            assert row["compile"] is True and row["graphs_compiled_while_timed"] == 0
            assert row["slice_gradient_gap"] < 1e-9 and row["gradient_gap"] < 1e-4


def tiny_model() -> PreTrainedModel:
    return set_recompute(build_model(CASES["tiny"].decoder, CPU), "selective")


def pack_of(rank: int) -> Microbatch:
    """Other lengths on each rank."""
    group = make_group(CASES["tiny"].decoder.vocab_size, 31 + 4 * rank, [7, 1, 12 - rank], rank)
    return weak_scaling.in_root(pack_update([group], Variant.named("auto/selective/layers"), 1, CPU)[0])


def gradients(model: PreTrainedModel, microbatches: list[Microbatch]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    for microbatch in microbatches:
        microbatch.backward(model)
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: weak_scaling.whole(grad).clone() for name, grad in grads.items()}


def compiled_steps_between_updates(ranks: DataParallel, _: Path) -> dict[str, Any]:
    """Gradients of three steps, weights changed between them: compiled and cut, and of a whole model."""
    cut, whole = set_compile(tiny_model(), "layers", backend="aot_eager"), tiny_model()
    shard_model(cut, shard_mesh("cpu"), layers=decoder_layers(cut), compute_dtype=cut.dtype)
    found: dict[str, Any] = {"cut": [], "whole": [], "graphs": []}
    for _step in range(3):
        found["cut"].append(gradients(cut, [pack_of(ranks.rank)]))
        found["whole"].append(gradients(whole, [pack_of(rank) for rank in range(ranks.world_size)]))
        found["graphs"].append(counters["stats"]["unique_graphs"])
        reshard(cut)
        with torch.no_grad():
            for parameter in [*cut.parameters(), *whole.parameters()]:
                parameter.mul_(1.5)
    return found


@pytest.mark.full
def test_graphs_hold_no_gathered_weights(tmp_path: Path):
    """A graph that kept the weights of the step that it was compiled in would be right in that step alone."""
    for found in run_on_ranks(2, compiled_steps_between_updates, tmp_path):
        assert found["graphs"] == [1, 1, 1]
        for cut, whole in zip(found["cut"], found["whole"], strict=True):
            assert cut.keys() == whole.keys()
            for name, wanted in whole.items():
                torch.testing.assert_close(cut[name], wanted, rtol=1e-3, atol=1e-5, msg=name)
        first, second, _ = found["whole"]
        assert all((first[name] - second[name]).norm() > 0.05 * first[name].norm() for name in first)


def one_rank(ranks: DataParallel, _: Path) -> dict[str, Any]:
    (row,) = bench(ranks, "none/none/keep/1").rows
    assert not torch.distributed.is_initialized()
    return {**row.case, **row.figures}


def test_one_rank_is_measured_too(tmp_path: Path):
    (row,) = run_on_ranks(1, one_rank, tmp_path)
    assert row["gpus"] == 1 and row["efficiency"] > 0 and row["gradient_gap"] < 1e-4


def refusals(ranks: DataParallel, _: Path) -> list[str]:
    messages: list[str] = []
    for cases, ways in ((["8b-p8192-r1024-n16"], None), (["nothing"], None), (None, ["none/none/reshard/3"])):
        with pytest.raises(UserError) as error:
            bench_weak_scaling(ranks, cases=cases, ways=ways, num_steps=1, command="")
        messages.append(str(error.value))
    return messages


def test_what_cannot_run_is_refused(tmp_path: Path):
    too_large, no_case, no_way = run_on_ranks(1, refusals, tmp_path)[0]
    assert "too large for a CPU" in too_large
    assert "no such update: nothing" in no_case
    assert "no such way: none/none/reshard/3" in no_way and all(name in no_way for name in WAYS)
