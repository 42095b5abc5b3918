"""How a process finds its place: torchrun's variables, right and wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ratoon.distributed import CollectiveError, from_environment
from ratoon.types import UserError

LAUNCH = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}

WORKER = """
import sys
import torch
from ratoon.distributed import from_environment
torch.set_num_threads(1)
ranks = from_environment("cpu", timeout_s=30)
total = ranks.all_reduce_sums({"x": ranks.rank + 1.0})["x"]
sys.stdout.write(f"sum {ranks.rank} {ranks.world_size} {ranks.local_rank} {total}\\n")
ranks.barrier()
ranks.close()
"""


def test_without_torchrun_there_is_one_rank():
    data_parallel = from_environment(environment={"PATH": "/bin"})
    assert (data_parallel.rank, data_parallel.world_size) == (0, 1)
    assert not dist.is_initialized()


def test_a_world_of_one_needs_no_group():
    assert from_environment(environment=LAUNCH).world_size == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", sorted(LAUNCH))
def test_a_missing_variable_is_named(name: str):
    environment = {key: value for key, value in LAUNCH.items() if key != name}
    with pytest.raises(UserError, match=rf"{name} are missing.*torchrun"):
        from_environment(environment=environment)


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("zero", "2"), ("0", "")])
def test_a_wrong_place_is_named_with_its_value(rank: str, world_size: str):
    with pytest.raises(UserError, match=f"RANK='{rank}'"):
        from_environment(environment=LAUNCH | {"RANK": rank, "WORLD_SIZE": world_size})


def test_ranks_that_never_start_end_the_wait():
    """verl#7155: a wait without an end, and without a name, is what users suffer from."""
    with pytest.raises(CollectiveError, match=r"rank 1 of 2 could not join the others at 127.0.0.1:1 within 1 s"):
        from_environment(environment=LAUNCH | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, timeout_s=1)


ALONE = """
import threading, time
from ratoon.distributed import from_environment
threading.Timer(1.0, lambda: print("waits", flush=True)).start()
from_environment(timeout_s=100)
"""


def test_ctrl_c_ends_the_wait():
    """torch does not look for signals while it waits for ranks that the same Ctrl-C may have ended."""
    source = str(Path(__file__).parents[2] / "src")
    waiting = subprocess.Popen(
        [sys.executable, "-c", ALONE],
        env=os.environ | LAUNCH | {"PYTHONPATH": source, "WORLD_SIZE": "2", "MASTER_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with waiting:
        try:
            assert waiting.stdout is not None and waiting.stdout.readline() == b"waits\n"
            started = time.monotonic()
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(timeout=30) == -signal.SIGINT
            assert time.monotonic() - started < 20
            assert waiting.stderr is not None and b"Traceback" not in waiting.stderr.read()
        finally:
            waiting.kill()


@pytest.mark.full
def test_torchrun_starts_two_ranks(tmp_path: Path):
    (tmp_path / "worker.py").write_text(WORKER)
    source = str(Path(__file__).parents[2] / "src")
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(tmp_path / "worker.py"),
        ],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    lines = sorted(line for line in finished.stdout.splitlines() if line.startswith("sum"))
    assert lines == ["sum 0 2 0 3.0", "sum 1 2 1 3.0"]
