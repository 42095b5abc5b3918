"""Two GPUs, sharded over NCCL, against one that holds the whole model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = """
import sys
from pathlib import Path

import torch
from tests.distributed.test_sharded import Case, backward_all, build, layers_of, optimizer_of
from tests.distributed.test_sharded import train, whole_gradients

from ratoon.distributed import from_environment, full_weights, load_sharded, save_sharded, shard_mesh, shard_model

device, folder = sys.argv[1], Path(sys.argv[2])
ranks = from_environment(device, timeout_s=120)
place = {"rank": ranks.rank, "world_size": ranks.world_size}


def sharded(case, compute_dtype):
    model = build(case)
    return shard_model(model, shard_mesh(device), layers=layers_of(model), compute_dtype=compute_dtype)


for tied, recompute in ((True, "none"), (False, "full")):
    case = Case(dtype=torch.float32, tied=tied, recompute=recompute)
    expected = train(build(case).to(device), case)
    got = train(sharded(case, torch.float32), case, **place)
    # AdamW moves a weight whose gradient is all rounding by a whole step, hence the second limit.
    for part, limit in (("grads", 1e-3), ("weights", 2e-2)):
        for name, value in expected[part].items():
            error = (got[part][name] - value).norm() / value.norm()
            assert error < limit, f"{part} {name}: {error:.5f}"
    assert abs(got["norms"][0] - expected["norms"][0]) < 1e-3 * expected["norms"][0]

case = Case(dtype=torch.bfloat16, tied=False)
exact = build(case).float().to(device)
backward_all(exact, case, rank=0, world_size=1)
model = sharded(case, torch.bfloat16)
optimizer = optimizer_of(model)
backward_all(model, case, **place)
grads = whole_gradients(model)
for name, parameter in exact.named_parameters():
    error = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
    assert grads[name].dtype == torch.float32 and error < 0.05, f"{name}: {error:.3f}"

optimizer.step()
save_sharded(folder, model, optimizer, process_group=ranks.control_group)
again = sharded(case, torch.bfloat16)
second = optimizer_of(again)
load_sharded(folder, again, second, process_group=ranks.control_group)
for (name, value), (_, wanted) in zip(full_weights(again), full_weights(model), strict=True):
    assert torch.equal(value, wanted), name
assert len(second.state) == len(optimizer.state) > 0
ranks.barrier(60)
ranks.close()
sys.stdout.write(f"rank {ranks.rank} passed\\n")
"""


def run_worker(folder: Path, device: str) -> None:
    (folder / "worker.py").write_text(WORKER)
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launch, str(folder / "worker.py"), device, str(folder / "checkpoint")],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stderr
    assert all(f"rank {rank} passed" in finished.stdout for rank in range(2))


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_worker(tmp_path, "cuda")


@pytest.mark.full
def test_the_same_under_torchrun_without_gpus(tmp_path: Path):
    run_worker(tmp_path, "cpu")
