"""The processes that `ratoon train` starts: their places, signals, failures and ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ratoon.cli import launch
from ratoon.cli.launch import is_a_rank, is_first_of_host, leave_to_launcher, num_ranks, run_ranks
from ratoon.trainer.config import TrainerConfig
from ratoon.types import UserError

# Writes its process id and place, then does as its rank's word says. No torch: it starts in milliseconds.
WORKER = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path(f"pid-{rank}").write_text(str(os.getpid()))
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
Path(f"torch-says-{rank}").write_text(os.environ["TORCH_CPP_LOG_LEVEL"])
Path(f"place-{rank}").write_text(" ".join(os.environ[name] for name in names))
word = sys.argv[1 + int(rank)]
def told(number, frame):
    with open(f"signals-{rank}", "a") as file:
        print(number, file=file)
    if word != "deaf":
        sys.exit(128 + number)
if word in ("deaf", "wait"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)
Path(f"ready-{rank}").touch()
if word in ("deaf", "wait"):
    while True:
        time.sleep(0.01)
if word == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if word == "lose":  # another rank, of which it hears after half a second at most
    from ratoon.cli.launch import leave_to_launcher
    time.sleep(0.2)
    assert leave_to_launcher(f"rank {rank} lost\\nanother one")
    sys.exit(1)
if word == "flood":
    from ratoon.cli.launch import leave_to_launcher
    handed_over = [leave_to_launcher("x" * 4000) for _ in range(40)]
    sys.exit(handed_over[0] is False or handed_over[-1] is True)
if word == "fail":
    time.sleep(0.6)
    print("its own cause", file=sys.stderr)
    sys.exit(1)
sys.exit(int(word))
"""

PARENT = """
import sys
from ratoon.cli.launch import run_ranks
sys.exit(run_ranks([sys.executable, *sys.argv[1:]], 2))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*words: str) -> int:
    return run_ranks([sys.executable, "worker.py", *words], len(words))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_each_rank_has_its_place(worker: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert run("0", "0", "0") == 0
    places = [(worker / f"place-{rank}").read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [["3", str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[4] for place in places}) == 1 and 0 < int(places[0][4]) < 65536
    assert [place[5] for place in places] == ["2"] * 3


def test_threads_are_as_the_user_says(worker: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run("0") == 0
    assert (worker / "place-0").read_text().split()[5] == "5"


@pytest.mark.parametrize(("asked", "level"), [(None, "FATAL"), ("INFO", "INFO")])
def test_torch_writes_no_lines_of_its_own_unless_the_user_asks(
    worker: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, level: str
):
    """What it would say beside the run's own complaint stands in the traceback in run.log."""
    if asked is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", asked)
    assert run("0", "0") == 0
    assert [(worker / f"torch-says-{rank}").read_text() for rank in range(2)] == [level] * 2


@pytest.mark.parametrize(
    ("words", "status"), [(("3", "3"), 3), (("143", "143"), 143), (("2", "2"), 2), (("0", "1"), 1), (("1", "0"), 1)]
)
def test_the_status_is_the_run_s_own(
    worker: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], status: int
):
    assert run(*words) == status
    assert capfd.readouterr().err == "", "the rank itself has said why"


def test_a_killed_rank_is_named_and_ends_the_others(
    worker: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)
    started = time.monotonic()
    assert run("deaf", "die", "deaf") == 1
    assert time.monotonic() - started < 20
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "rank 1 of 3 was ended by SIGKILL" in error and "memory" in error
    assert not any(is_alive(int((worker / f"pid-{rank}").read_text())) for rank in range(3))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("lose", "die", "lose"), "ratoon train: rank 1 of 3 was ended by SIGKILL"),
        (("lose", "fail"), "its own cause"),
        (("fail", "lose"), "its own cause"),
        (("deaf", "lose", "lose"), "ratoon train: rank 1 lost another one"),
    ],
    ids=["killed", "failed later", "failed", "hung"],
)
def test_of_one_cause_one_paragraph_is_told(
    worker: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
):
    """Ranks that have only lost another one say nothing beside it; where it hangs, one of them does."""
    monkeypatch.setattr(launch, "_GRACE_S", 1.0)
    assert run(*words) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error.startswith(told), error


def test_where_many_have_spoken_the_next_rank_speaks_for_itself_and_does_not_wait(worker: Path):
    assert run("flood", "0") == 0


def test_a_rank_of_another_launcher_speaks_for_itself():
    assert not leave_to_launcher("lost", {"RANK": "0"})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(worker: Path, number: int):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "worker.py", "wait", "wait"])
    wait_until(lambda: all((worker / f"ready-{rank}").exists() for rank in range(2)))
    parent.send_signal(number)
    assert parent.wait(timeout=30) == 128 + number
    assert [(worker / f"signals-{rank}").read_text().split() for rank in range(2)] == [[str(int(number))]] * 2


def test_ranks_that_do_not_listen_end_after_a_second_signal(worker: Path):
    script = PARENT.replace("sys.exit(", "import ratoon.cli.launch\nratoon.cli.launch._AT_ONCE_S = 0.2\nsys.exit(")
    parent = subprocess.Popen([sys.executable, "-c", script, "worker.py", "deaf", "wait"])
    wait_until(lambda: all((worker / f"ready-{rank}").exists() for rank in range(2)))
    parent.send_signal(signal.SIGINT)
    wait_until((worker / "signals-0").exists)
    assert is_alive(int((worker / "pid-0").read_text()))
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 130
    assert not is_alive(int((worker / "pid-0").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's doing")
def test_no_rank_outlives_a_killed_parent(worker: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "worker.py", "deaf", "deaf"])
    wait_until(lambda: all((worker / f"ready-{rank}").exists() for rank in range(2)))
    pids = [int((worker / f"pid-{rank}").read_text()) for rank in range(2)]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait(timeout=30)
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("settings", "num_gpus", "count"),
    [
        ({}, 0, 1),
        ({}, 1, 1),
        ({}, 4, 4),
        ({"device": "cpu"}, 4, 1),
        ({"device": "cuda"}, 4, 4),
        ({"num_processes": 1}, 4, 1),
        ({"num_processes": 3}, 4, 3),
        ({"num_processes": 2}, 0, 2),
        ({"num_processes": 2, "device": "cpu"}, 4, 2),
        ({"num_processes": 2, "device": "cuda"}, 0, 1),
    ],
)
def test_how_many_processes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], num_gpus: int, count: int):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert num_ranks(TrainerConfig.model_validate(settings)) == count


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match=r"num_processes = 3, but this host shows 2 GPUs"):
        num_ranks(TrainerConfig(num_processes=3))


def test_whom_a_launcher_has_started():
    assert not is_a_rank({"PATH": "/bin"}) and is_a_rank({"RANK": "0"}) and is_a_rank({"WORLD_SIZE": "2"})
    assert is_first_of_host({"RANK": "4", "LOCAL_RANK": "0"}) and is_first_of_host({})
    assert not is_first_of_host({"RANK": "4", "LOCAL_RANK": "1"})
