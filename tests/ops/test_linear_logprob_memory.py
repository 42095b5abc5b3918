"""`linear_logprob` never holds [M, V], with or without autograd.

The reports behind this file: slime#2253 (fp32 [T, V] logits made before they were sliced, so chunking the loss lowered
nothing), NeMo-RL#4222 (a chunked loop whose chunks autograd kept), NeMo-RL#3124 (chunks concatenated to [B, S, V]
before the gather), TRL#4013 (entropy alone took 80 GB).
"""

# Shape letters: M scored tokens, C channels, V vocabulary.

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.eager_logprob import make_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratoon.ops import linear_logprob
from ratoon.ops.logprob import tiling

MIB = 1 << 20


class LargestResult(TorchDispatchMode):
    """Records the most elements that any operation returned, forward or backward, and counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *(nbytes // 4 for nbytes in storages)])
        self.num_products += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return result


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a tile."""
    monkeypatch.setattr(tiling, "CPU_TILE_ROWS", 64)
    monkeypatch.setattr(tiling, "CPU_TILE_BYTES", 64 * 128 * 4)
    return 64 * 128


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "bias": True, "logit_softcap": 30.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_operation_returns_a_large_tensor(small_tiles: int, dtype: torch.dtype, options: dict[str, Any]):
    """Forward and backward, log-probs and entropy: at most three tiles, or something of an input's size."""
    M, C, V = 700, 8, 3000
    case = make_case(M, C, V, **options).to(dtype)
    hidden_MC, weight_VC = case.hidden_MC.requires_grad_(), case.weight_VC.requires_grad_()
    with LargestResult() as largest:
        logprobs_M, entropy_M = linear_logprob(hidden_MC, weight_VC, case.target_M, bias=case.bias_V, **case.options)
        (logprobs_M + entropy_M).sum().backward()
    assert 0 < largest.numel <= max(3 * small_tiles, V * C)
    assert largest.numel < M * V / 50


def test_gradients_that_nobody_needs_cost_no_matrix_product(small_tiles: int):
    """A frozen head (LoRA) or a probe on frozen hidden states: two products a tile in backward instead of three."""
    case = make_case(64, 8, 256).to(torch.float32)
    counts = []
    for needed in ((True, True), (True, False), (False, True)):
        inputs = [
            x.clone().requires_grad_(need) for x, need in zip((case.hidden_MC, case.weight_VC), needed, strict=True)
        ]
        logprobs_M, _ = linear_logprob(inputs[0], inputs[1], case.target_M)
        with LargestResult() as backward:
            logprobs_M.sum().backward()
        counts.append(backward.num_products)
    assert counts == [6, 4, 4]


def test_forward_keeps_three_numbers_a_row():
    """Beside the inputs themselves, nothing but [M] waits for backward (NeMo-RL#4222)."""
    case = make_case(50, 8, 3000, bias=True).to(torch.float32)
    inputs = [case.hidden_MC.requires_grad_(), case.weight_VC.requires_grad_(), case.bias_V, case.target_M]
    known = {x.data_ptr() for x in inputs if x is not None}
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logprob(case.hidden_MC, case.weight_VC, case.target_M, bias=case.bias_V)
    assert kept == [50, 50, 50]


PEAK_PROGRAM = """
import sys
import torch
from ratoon.ops import linear_logprob

def status_kib(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

def run(hidden_MC, weight_VC, target_M):
    logprobs_M, entropy_M = linear_logprob(hidden_MC, weight_VC, target_M, temperature=0.7)
    (logprobs_M + 0.01 * entropy_M).sum().backward()

torch.set_num_threads(1)
M, C, V = map(int, sys.argv[1:])
hidden_MC = torch.randn(M, C, requires_grad=True)
weight_VC = torch.randn(V, C, requires_grad=True)
target_M = torch.randint(0, V, (M,))
# The libraries' own buffers and threads are not the operation's.
run(torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.zeros(8, dtype=torch.int64))
before_kib = status_kib("VmRSS")
run(hidden_MC, weight_VC, target_M)
assert hidden_MC.grad is not None and weight_VC.grad is not None
# The whole process's high-water mark: never less than the operation's.
print((status_kib("VmHWM") - before_kib) * 1024)
"""


def measure_peak_rise_bytes(M: int, C: int, V: int) -> int:
    """Peak memory of forward and backward in a fresh process, above what the inputs take. fp32; gradients count."""
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM, str(M), str(C), str(V)],
        env={"PYTHONPATH": str(root / "src"), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return int(process.stdout)


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")


@needs_proc
def test_peak_memory_of_a_sample():
    """M 2048, V 50,001: the logits alone would be 391 MiB, the gradients are 14 MiB."""
    assert measure_peak_rise_bytes(2048, 64, 50_001) < 100 * MIB


@needs_proc
@pytest.mark.full
def test_peak_memory_of_a_large_vocabulary():
    """M 8192, C 256, V 151,936 rises by less than 400 MB, of which 164 MB are the gradients; the logits are 5 GB."""
    assert measure_peak_rise_bytes(8192, 256, 151_936) < 400_000_000
