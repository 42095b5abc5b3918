"""Two GPUs: gradients summed by NCCL, numbers and barriers by gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = """
import sys
import torch
from ratoon.distributed import CollectiveError, from_environment

ranks = from_environment("cuda", timeout_s=60)
device = torch.device("cuda", ranks.local_rank)
assert torch.cuda.current_device() == ranks.local_rank
parameters = [torch.zeros(shape, device=device, requires_grad=True) for shape in [(3000, 5000), (7,), (2, 3)]]
parameters.append(torch.zeros(100, device=device, dtype=torch.bfloat16, requires_grad=True))
if ranks.rank == 0:
    for index, parameter in enumerate(parameters):
        if index != 1:
            parameter.grad = torch.full_like(parameter, 1.0 + index)
if ranks.rank == 1:
    parameters[0].grad = torch.full_like(parameters[0], 2.0)
ranks.all_reduce_gradients(parameters)
assert parameters[0].grad.eq(3.0).all() and parameters[1].grad is None
assert parameters[2].grad.eq(3.0).all() and parameters[3].grad.eq(4.0).all()
assert parameters[3].grad.dtype == torch.bfloat16
with torch.no_grad():
    parameters[0].fill_(float(ranks.rank + 1))
ranks.broadcast_parameters(parameters)
assert parameters[0].eq(1.0).all()
assert ranks.all_reduce_sums({"x": 2.0**24 + ranks.rank}) == {"x": 2.0**25 + 1}
assert ranks.all_reduce_maxima({"x": float(ranks.rank)}) == {"x": 1.0}
ranks.barrier(30)
ranks.close()
sys.stdout.write(f"rank {ranks.rank} passed\\n")
"""


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launch, str(tmp_path / "worker.py")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert all(f"rank {rank} passed" in finished.stdout for rank in range(2))
