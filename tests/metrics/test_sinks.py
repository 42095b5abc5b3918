"""Sinks hold what metrics.jsonl holds, whatever happens to the run; and a run goes on, whatever happens to its sinks.

TensorBoard, wandb and trackio are the real ones, without a network, and are read back by their own readers. Sinks that
fail or hang are a stand-in named wandb.
"""

import json
import math
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.sampling import sampled

import ratoon
from ratoon.metrics import MetricsLog, Sinks, check_sinks
from ratoon.metrics.config import LoggingConfig, SinkName
from ratoon.metrics.sink_task import run_id_of
from ratoon.types import UserError

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent anywhere, nothing is written outside."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def open_log(run_dir: Path, *sinks: SinkName, said: list[str], **settings: object) -> MetricsLog:
    config = LoggingConfig.model_validate({"sinks": sinks, **settings})
    metrics = run_dir / "metrics.jsonl"
    copies = Sinks(config, run_dir=run_dir, run_name=run_dir.name, warn=said.append, metrics=metrics)
    return MetricsLog(metrics, warn=said.append, sinks=copies)


def log_steps(log: MetricsLog, first: int, last: int, **values: object) -> None:
    for step in range(first, last + 1):
        log.log(step, "train", reward_mean=step / 8, note="words", is_final=True, nothing=None, **values)


def log_twice(run_dir: Path, *sinks: SinkName, **settings: object) -> list[str]:
    """A run that is killed after step 4 with its last checkpoint at step 2, and resumed to the end."""
    said: list[str] = []
    with open_log(run_dir, *sinks, said=said, **settings) as log:
        for step in range(1, 10):
            log.log(step, "sft", loss=1 / step)
        log.log(0, "evaluate", reward_mean=0.0)
        log_steps(log, 1, 4)
    with open_log(run_dir, *sinks, said=said, **settings) as log:
        log.truncate_after(2)
        log_steps(log, 3, NUM_STEPS)
    return said


REWARDS = {step: step / 8 for step in range(1, NUM_STEPS + 1)}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_each_number_once_after_a_resume(tmp_path: Path):
    run_dir = tmp_path / "run"
    assert log_twice(run_dir, "tensorboard") == []
    found = scalars(run_dir / "tensorboard")
    assert found == {
        "train/reward_mean": list(REWARDS.items()),
        "evaluate/reward_mean": [(0, 0.0)],
        "sft/loss": [(step, pytest.approx(1 / step, rel=1e-6)) for step in range(1, 10)],
    }


def test_open_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir, said = tmp_path / "run", []
    with open_log(run_dir, "tensorboard", said=said) as log:
        log.log(9, "sft", loss=1.0)
        log_steps(log, 1, 5, old=1.0)
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("train/reward_mean")) == 5
    with open_log(run_dir, "tensorboard", said=said) as log:
        log.truncate_after(2)
        log_steps(log, 3, 4)
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward_mean")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("train/old")] == [1, 2]
    assert [event.step for event in events.Scalars("sft/loss")] == [9]


@pytest.mark.full
def test_tensorboard_holds_two_files_after_many_resumes_and_a_clock_set_back(
    tmp_path: Path,
):
    run_dir, said = tmp_path / "run", []
    for step in range(1, 5):
        with open_log(run_dir, "tensorboard", said=said) as log:
            log.log(step, "train", loss=step)
        for path in (run_dir / "tensorboard").iterdir():  # as if it had been begun in the future
            parts = path.name.split(".")
            parts[3] = "4000000000" if parts[3].startswith("1") else parts[3]
            path.rename(path.with_name(".".join(parts)))
    assert said == []
    assert len(list((run_dir / "tensorboard").iterdir())) == 2
    assert scalars(run_dir / "tensorboard")["train/loss"] == [(step, float(step)) for step in range(1, 5)]


def test_tensorboard_keeps_times_and_numbers_of_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said: list[str] = []
    monkeypatch.setattr(time, "time", lambda: 1_234_567.5)
    with open_log(tmp_path / "run", "tensorboard", said=said) as log:
        log.log(2**40, "train", nan=math.nan, inf=-math.inf, huge=1e300, count=2**100, tiny=1e-300)
    monkeypatch.undo()
    assert said == []
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    values = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {event.wall_time for event in values.values()} == {1_234_567.5}
    assert {event.step for event in values.values()} == {2**40}
    assert math.isnan(values["train/nan"].value)
    assert values["train/inf"].value == -math.inf
    assert values["train/huge"].value == math.inf
    assert values["train/count"].value == 2.0**100
    assert values["train/tiny"].value == 0


def test_tensorboard_folder_is_shared_by_runs_and_no_other_file_is_touched(tmp_path: Path):
    shared = tmp_path / "board"
    for name in ("first", "second"):
        (shared / name).mkdir(parents=True)
        (shared / name / "events.out.tfevents.1.other").write_bytes(b"")
        log_twice(tmp_path / "runs" / name, "tensorboard", tensorboard_dir="board")
    for name in ("first", "second"):
        files = sorted(path.name for path in (shared / name).iterdir())
        assert len(files) == 3 and files[0] == "events.out.tfevents.1.other"
        assert scalars(shared / name)["train/reward_mean"] == list(REWARDS.items())


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of an offline run's file: a log of LevelDB's format behind a header of 7 bytes."""
    content, record, at = path.read_bytes(), b"", 7
    while at < len(content):
        if at % 32_768 > 32_768 - 7:  # no header fits into the rest of the block
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def wandb_rows(run_dir: Path) -> list[dict[str, float]]:
    """History of the offline runs, in the order in which they were made."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows: list[dict[str, float]] = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in wandb_records(path):
            record = proto.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_holds_each_number_once_after_a_resume(tmp_path: Path):
    run_dir = tmp_path / "run"
    (run_dir / "sinks").mkdir(parents=True)
    (run_dir / "recipe.toml").write_text("[trainer]\nnum_steps = 6\n")
    assert log_twice(run_dir, "wandb", project="spelling", group="sweep") == []
    rows = wandb_rows(run_dir)
    assert {row["train/step"]: row["train/reward_mean"] for row in rows if "train/step" in row} == REWARDS
    assert [row["sft/step"] for row in rows if "sft/step" in row] == list(range(1, 10))
    assert len(rows) == NUM_STEPS + 9 + 1
    assert not any("note" in name or "is_final" in name or "nothing" in name for row in rows for name in row)
    folders = list((run_dir / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1, "both are one run"


def trackio_rows(tmp_path: Path, project: str) -> list[tuple[str, int, dict[str, float]]]:
    with sqlite3.connect(tmp_path / "trackio" / f"{project}.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    return [(name, step, json.loads(metrics)) for name, step, metrics in rows]


@pytest.mark.full
def test_trackio_holds_each_number_once_after_a_resume(tmp_path: Path):
    run_dir = tmp_path / "run"
    assert log_twice(run_dir, "trackio", project="spelling") == []
    rows = trackio_rows(tmp_path, "spelling")
    assert {name for name, *_ in rows} == {f"run-{run_id_of(run_dir, 'run')}"}
    train = [(step, values["train/reward_mean"]) for _, step, values in rows if "train/reward_mean" in values]
    assert train == list(REWARDS.items())
    assert [step for _, step, values in rows if "sft/loss" in values] == list(range(1, 10))
    assert len(rows) == NUM_STEPS + 9 + 1


def test_sink_that_begins_later_gets_the_earlier_rows(tmp_path: Path):
    said: list[str] = []
    with open_log(tmp_path / "run", said=said) as log:
        log_steps(log, 1, 4)
    with open_log(tmp_path / "run", "trackio", "tensorboard", said=said) as log:
        log_steps(log, 5, NUM_STEPS)
    assert said == []
    assert [step for _, step, _ in trackio_rows(tmp_path, "ratoon")] == list(REWARDS)
    assert scalars(tmp_path / "run" / "tensorboard")["train/reward_mean"] == list(REWARDS.items())


def test_copy_of_a_run_under_another_name_is_another_run(tmp_path: Path):
    first = run_id_of(tmp_path / "run", "run")
    assert run_id_of(tmp_path / "run", "run") == first
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = run_id_of(tmp_path / "copy", "copy")
    assert copy != first
    assert run_id_of(tmp_path / "copy", "copy") == copy
    for spoilt in ("", "[]", '{"run_name": "run"}', '{"run_name": "run", "run_id": 5}'):
        (tmp_path / "run" / "sinks" / "run.json").write_text(spoilt)
        assert len(run_id_of(tmp_path / "run", "run")) == len(first)


@pytest.mark.parametrize("spoilt", ["", "[]", '{"destination": 3}', '{"sent": {"train": "many"}}'])
def test_spoilt_note_of_progress_sends_rows_again(tmp_path: Path, spoilt: str):
    from ratoon.metrics.sink_process import _read_progress
    from ratoon.metrics.sink_task import SinkTask

    task = SinkTask(
        sink="wandb", run_dir=str(tmp_path), metrics_path="", run_name="run", run_id="1", project="p", entity=None,
        group=None, tensorboard_dir="", timeout_s=1, parent_pid=0,
    )  # fmt: skip
    assert SinkTask.from_json(task.to_json()) == task
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "wandb.json").write_text(spoilt)
    assert _read_progress(task) == {}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `wandb` whose functions a test gives a body; it marks its process id."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package / "__init__.py"


STAND_IN = """\
import os, sys, time
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
def Settings(**_): pass
class Run:
    def define_metric(self, *_, **__): pass
    def log(self, values): {log}
    def finish(self, exit_code):
        Path(__file__).with_name("exit_code").write_text(str(exit_code))
        {finish}
def init(**_):
    {init}
    return Run()
"""


def write_stand_in(path: Path, *, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
    path.write_text(STAND_IN.format(init=init, log=log, finish=finish))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


FAULTS = {
    "full disk": ("raise OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"),
    "exit": ("sys.exit('not logged in')", "SystemExit: not logged in"),
    "killed": ("os.kill(os.getpid(), 9)", "its process ended with status -9"),
}
SAMPLED = (("log", "full disk"), ("init", "exit"), ("finish", "killed"))


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        pytest.param(where, fault, marks=[] if (where, fault) in SAMPLED else pytest.mark.full)
        for where in ("init", "log", "finish")
        for fault in FAULTS
    ],
)
def test_failing_sink_is_warned_of_once(tmp_path: Path, stand_in: Path, where: str, fault: str):
    body, reason = FAULTS[fault]
    write_stand_in(stand_in, **{where: body})
    said: list[str] = []
    with open_log(tmp_path / "run", "wandb", said=said) as log:
        log_steps(log, 1, 2)
        if where != "finish":
            wait_until(lambda: (log.log(3, "train", loss=0.0), said)[1])
        log_steps(log, 4, 9)
    (warning,) = said
    assert f"wandb failed ({reason}; " in warning
    assert str(tmp_path / "run" / "sinks" / "wandb.log") in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 8


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_hanging_sink_is_ended_in_time(tmp_path: Path, stand_in: Path, where: str):
    """TRL#6796: a thread joined without a timeout. Here `finish` of a sink whose network hangs."""
    write_stand_in(stand_in, **{where: "time.sleep(600)"})
    said: list[str] = []
    with open_log(tmp_path / "run", "wandb", said=said, timeout_s=0.5) as log:
        log_steps(log, 1, 1)
        wait_until(lambda: (stand_in.parent / "pid").exists())
        started = time.monotonic()
        log_steps(log, 2, 200)
        assert time.monotonic() - started < 1, "rows do not wait"
        started = time.monotonic()
    assert time.monotonic() - started < 5
    (warning,) = said
    assert "did not finish within logging.timeout_s = 0.5 seconds" in warning
    assert not is_running(int((stand_in.parent / "pid").read_text()))


@pytest.mark.parametrize("how", sampled("failure", "second Ctrl-C"))
def test_ending_of_the_run_is_told(tmp_path: Path, stand_in: Path, how: str):
    write_stand_in(stand_in, finish="time.sleep(1.5)")
    started, said = 0.0, []
    error = KeyboardInterrupt() if how == "second Ctrl-C" else RuntimeError("the cache is on fire")
    with suppress(type(error)), open_log(tmp_path / "run", "wandb", said=said) as log:
        log_steps(log, 1, 2)
        wait_until(lambda: (stand_in.parent / "pid").exists())
        started = time.monotonic()
        raise error
    waited = time.monotonic() - started > 1.2
    assert waited == (how == "failure"), "who interrupts twice waits for nothing"
    wait_until(lambda: not is_running(int((stand_in.parent / "pid").read_text())))
    assert (stand_in.parent / "exit_code").read_text() == "1"
    assert said == []


KILLED = """\
import os, sys
from pathlib import Path
from ratoon.metrics import MetricsLog, Sinks
from ratoon.metrics.config import LoggingConfig
run_dir, with_worker = Path(sys.argv[1]), sys.argv[2] == "with a worker"
config = LoggingConfig(sinks=("tensorboard",), timeout_s=20)
metrics = run_dir / "metrics.jsonl"
log = MetricsLog(metrics, sinks=Sinks(config, run_dir=run_dir, run_name="run", warn=print, metrics=metrics))
log.log(1, "train", loss=1.0)
if with_worker and os.fork() == 0:  # it holds the sink's pipe
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
for step in range(2, 1001):
    log.log(step, "train", loss=float(step))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("worker", ["alone", "with a worker"])
def test_killed_runs_sinks_send_the_last_rows_and_end(tmp_path: Path, worker: str):
    run_dir = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(ratoon.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run_dir), worker], env=environment, stdin=subprocess.PIPE
    ) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
        lock = run_dir / "sinks" / "tensorboard.lock"
        wait_until(lambda: lock.exists() and str(lock) not in open_files())
    assert [step for step, _ in scalars(run_dir / "tensorboard")["train/loss"]] == list(range(1, 1001))


def open_files() -> set[str]:
    """What the processes of this user hold open."""
    found: set[str] = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return found


def test_next_run_waits_for_the_sink_that_a_killed_one_left(tmp_path: Path, stand_in: Path):
    """Two writers of one wandb run would mix their rows."""
    write_stand_in(
        stand_in,
        init='Path(__file__).with_name("trace").open("a").write("begin ")',
        finish='time.sleep(1); Path(__file__).with_name("trace").open("a").write("end ")',
    )
    said: list[str] = []
    first = open_log(tmp_path / "run", "wandb", said=said)
    first.log(1, "train", loss=1.0)
    wait_until(lambda: (stand_in.parent / "trace").exists())
    first.close("failed", wait=False)
    with open_log(tmp_path / "run", "wandb", said=said) as log:
        log.log(2, "train", loss=1.0)
    assert said == []
    assert (stand_in.parent / "trace").read_text().split() == ["begin", "end", "begin", "end"]


def test_folder_that_cannot_be_written_is_a_warning(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sinks").write_text("a file")
    said: list[str] = []
    with open_log(tmp_path / "run", "tensorboard", "trackio", said=said) as log:
        log_steps(log, 1, 3)
    assert len(said) == 2
    assert all("could not be started" in text and "sinks" in text for text in said)


def test_modules_in_the_current_folder_do_not_take_the_place_of_the_sinks_own(tmp_path: Path):
    (tmp_path / "tensorboard.py").write_text("raise RuntimeError('the wrong one')\n")
    assert log_twice(tmp_path / "run", "tensorboard") == []


def test_no_sinks_start_no_process_and_leave_no_file(tmp_path: Path):
    said: list[str] = []
    with open_log(tmp_path / "run", said=said) as log:
        log_steps(log, 1, 2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_run_without_new_rows_starts_no_process(tmp_path: Path, stand_in: Path):
    write_stand_in(stand_in)
    with open_log(tmp_path / "run", "wandb", said=[]) as log:
        log.truncate_after(3)
    assert not (stand_in.parent / "pid").exists()


def test_sinks_process_imports_no_torch():
    code = "import sys, ratoon.metrics.sink_process; assert not {'torch', 'wandb', 'trackio'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(ratoon.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_missing_package_is_refused_by_the_name_of_its_extra(monkeypatch: pytest.MonkeyPatch):
    check_sinks(LoggingConfig())
    monkeypatch.setattr("ratoon.metrics.sinks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'logging\.sinks names "trackio".*pip install -e "\.\[trackio\]"'):
        check_sinks(LoggingConfig(sinks=("trackio",)))


def test_folder_named_like_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """wandb makes a folder `wandb` in the current one, where an `import wandb` would find it."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="not installed"):
        check_sinks(LoggingConfig(sinks=("wandb",)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sinks": ("mlflow",)}, "'tensorboard', 'wandb' or 'trackio'"),
        ({"sinks": ("wandb", "wandb")}, "may be named once"),
        ({"project": "a/b"}, "must be a name"),
        ({"project": ""}, "must be a name"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"timeout_s": math.inf}, "less than or equal"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, object], reason: str):
    with pytest.raises(ValidationError, match=reason):
        LoggingConfig.model_validate(settings)
