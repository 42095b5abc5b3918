"""Workers as processes: how they start, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.rewards.pools import RUNS_THE_RESPONSE, group_of, open_pool, rewards_of, scored

import ratoon
from ratoon.rewards import Cause, RewardConfig
from ratoon.rewards.messages import Orders, to_frame
from ratoon.rewards.output_log import OutputLog
from ratoon.rewards.pool import default_num_workers
from ratoon.rewards.worker_process import WorkerProcess
from ratoon.types import UserError

SOURCE_FOLDER = Path(ratoon.__file__).parents[1]
START_A_DAEMON = (
    "import os, subprocess, sys\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(1000)', {mark!r}]\n"
    "subprocess.Popen(sleep)\n"
    "subprocess.Popen(sleep, start_new_session=True)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    subprocess.Popen(sleep, start_new_session=True)\n"
    "    os._exit(0)\n"
    "value = 1\n"
)


def processes_marked(mark: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds: Callable[[], bool], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def workers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "ratoon.rewards.worker" in " ".join(child.cmdline())]


def test_a_worker_imports_nothing_heavy():
    """A hang costs the start of a worker."""
    code = (
        "import ratoon.rewards.worker, sys\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'asyncio', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE_FOLDER)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_by_default_there_are_few_workers():
    assert 1 <= default_num_workers() <= 4


def test_all_workers_are_used_and_none_is_left(tmp_path: Path):
    source = "import os, time\ndef score(response):\n    time.sleep(0.02)\n    return os.getpid()\n"
    with open_pool(tmp_path, source, num_workers=3) as pool:
        pool.check([])
        assert wait_until(lambda: len(set(scored(pool, *"abcdefghijkl"))) == 3)
        pids = {int(value) for value in scored(pool, *"abcdefghijkl")}
        assert not {os.getpid()} & pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_closing_takes_everything_that_a_function_started(tmp_path: Path):
    mark = f"ratoon-test-{tmp_path}-close"
    with open_pool(tmp_path, RUNS_THE_RESPONSE) as pool:
        assert scored(pool, START_A_DAEMON.format(mark=mark)) == [1.0]
        assert wait_until(lambda: len(processes_marked(mark)) == 3)
    assert wait_until(lambda: not processes_marked(mark))


def test_a_time_limit_takes_everything_that_a_function_started(tmp_path: Path):
    mark = f"ratoon-test-{tmp_path}-limit"
    with open_pool(tmp_path, RUNS_THE_RESPONSE, timeout_s=2.0, on_failure="zero") as pool:
        found = pool.score_now([group_of(START_A_DAEMON.format(mark=mark) + "while True: pass")])
        assert found.failures.counts == {Cause.TIMEOUT: 1}
        assert wait_until(lambda: not processes_marked(mark))


RUN = """
import sys, time
from pathlib import Path
from tests.rewards.pools import group_of, open_pool
pool = open_pool(Path(sys.argv[1]), num_workers=2, function="python:mine.py:score", timeout_s=1000)
pool.check([])
print("ready", flush=True)
if sys.argv[2] == "busy":
    pool.score_now([group_of("a", "b")])
elif sys.argv[2] == "leave":
    sys.exit(0)
time.sleep(1000)
"""


@pytest.mark.parametrize("what", ["idle", "busy", "leave"])
def test_no_worker_outlives_the_run(tmp_path: Path, what: str):
    """Killed by SIGKILL, while its workers are idle, or busy in C code with a child; or left without closing."""
    mark = f"ratoon-test-{tmp_path}"
    (tmp_path / "mine.py").write_text(
        "import re, subprocess, sys\n"
        "def score(response):\n"
        f"    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', {mark!r}])\n"
        "    return re.match('(a*)*b', 'a' * 60) is None\n"
    )
    path = os.pathsep.join([str(SOURCE_FOLDER), str(Path(__file__).parents[2])])
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), what], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.stdout is not None
    with run:
        assert run.stdout.readline() == "ready\n"
        workers = workers_of(run.pid) if what != "leave" else []
        if what == "busy":
            assert wait_until(lambda: len(processes_marked(mark)) == 2)
        if what != "leave":
            run.send_signal(signal.SIGKILL)
        assert run.wait(20) == (0 if what == "leave" else -9)
    assert len(workers) == (0 if what == "leave" else 2)
    assert wait_until(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))
    assert wait_until(lambda: not processes_marked(mark))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signals for a pipe that is hung up")
def test_a_worker_that_is_still_starting_does_not_outlive_the_run(tmp_path: Path):
    """The run ends before its new worker has asked the kernel for anything, and the user's file takes long to load."""
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)\ndef score(response): return 1\n")
    specs = RewardConfig(function="python:mine.py:score").specs
    worker = WorkerProcess(to_frame(Orders(specs, str(tmp_path), timeout_s=1.0, max_memory_bytes=None)), OutputLog())
    worker.send()
    try:
        for fd in worker.fds:
            os.close(fd)
        assert worker.process.wait(10) in (0, -signal.SIGKILL)
    finally:
        worker.process.kill()
        worker.process.wait()


def test_main_is_not_imported_again(tmp_path: Path):
    """Which multiprocessing would do: a script without a guard would train once more in every worker."""
    (tmp_path / "mine.py").write_text("def score(response):\n    return 1\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.rewards.pools import open_pool, scored\nprint('once')\n"
        "with open_pool(Path(__file__).parent, function='python:mine.py:score') as pool:\n"
        "    print(scored(pool, 'a'))\n"
    )
    path = os.pathsep.join([str(SOURCE_FOLDER), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("once\n[1.0]\n", "")


def test_memory_is_capped_if_so_told(tmp_path: Path):
    code = "value = len(b'x' * 10**9)"
    with open_pool(tmp_path, RUNS_THE_RESPONSE, on_failure="zero", max_memory_gb=0.5) as pool:
        found = pool.score_now([group_of("value = 1", code, "value = 2")])
        assert rewards_of(found.groups[0]) == [1.0, 0.0, 2.0]
        assert "MemoryError" in found.failures.examples[0]


@pytest.mark.parametrize("code", ["data = bytearray(10**9)", "import os; os._exit(5)"])
def test_what_cannot_be_loaded_under_a_cap_on_memory_names_the_cap(tmp_path: Path, code: str):
    source = f"{code}\ndef score(response):\n    return 1\n"
    with (
        open_pool(tmp_path, source, max_memory_gb=0.5) as pool,
        pytest.raises(UserError, match=r"\(under reward\.max_memory_gb = 0\.5, which may be too little"),
    ):
        pool.score_now([group_of("a")])


def test_a_worker_that_ends_between_calls_is_replaced(tmp_path: Path):
    """verifiers#1245: a dead sandbox was asked for ever."""
    source = (
        "import os, threading\ndef score(response):\n    threading.Timer(0.2, os._exit, [5]).start()\n    return 1\n"
    )
    with open_pool(tmp_path, source) as pool:
        for _ in range(3):
            assert scored(pool, "a") == [1.0]
            time.sleep(0.5)


def test_large_responses_travel(tmp_path: Path):
    """Longer than a pipe holds, in both directions at once."""
    source = "def score(response, notes):\n    print(response)\n    return len(response) + len(notes)\n"
    with open_pool(tmp_path, source) as pool:
        assert scored(pool, "x" * 3_000_000, "\ud800\x00é", notes="y" * 1_000_000) == [4_000_000, 1_000_003]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import os\nos._exit(3)\n", "ended with exit status 3 while it loaded python:mine.py:score"),
        ("import os\nprint('no licence')\nos.abort()\n", r"signal SIGABRT at .*mine\.py:3 .*no licence"),
        ("while True: pass\n", r"more than reward\.start_timeout_s = 1 s \(it was at .*mine\.py:1\)"),
        ("import time\ntime.sleep(1000)\n", r"more than reward\.start_timeout_s = 1 s \(it was at .*mine\.py:2\)"),
        ("import os\nos.closerange(3, 100)\ndef score(response): return 1\n", "a reward worker .* while it loaded"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path, source: str, wanted: str):
    """SvS#3. Importing it in the run would end the run without a word, or never end."""
    with (
        open_pool(tmp_path, source, start_timeout_s=1.0) as pool,
        pytest.raises(UserError, match=rf"^reward\.function: .*{wanted}"),
    ):
        pool.check([])


def test_a_file_that_forks_or_prints_when_imported_is_loaded(tmp_path: Path):
    source = "import os\nprint('x' * 10**6)\nos.fork()\ndef score(response):\n    return 1\n"
    with open_pool(tmp_path, source) as pool:
        pool.check([])
        assert scored(pool, "a", "b") == [1.0, 1.0]


def test_a_file_that_breaks_while_the_run_goes_on_ends_it_by_name(tmp_path: Path):
    with open_pool(tmp_path, RUNS_THE_RESPONSE, on_failure="zero") as pool:
        pool.check([])
        (tmp_path / "mine.py").write_text("def scor")
        with pytest.raises(UserError, match=r"mine\.py:1: SyntaxError"):
            pool.score_now([group_of("import os; os._exit(1)", "value = 1")])
        with pytest.raises(UserError, match=r"mine\.py:1: SyntaxError"):
            pool.score_now([group_of("value = 1")])
