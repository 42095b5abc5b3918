"""The three tools that numbers are copied to, behind one interface. Imported in a sink's own process only."""

import socket
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ratoon.metrics.config import SinkName
from ratoon.metrics.rows import MetricsRow
from ratoon.metrics.sink_task import SinkTask


class SinkWriter(Protocol):
    """Takes rows in the order of the file. Raises whatever the tool raises."""

    starts_empty: ClassVar[bool]
    """Whether it wants every row of the file anew, instead of those it lacks."""

    def write(self, row: MetricsRow, numbers: Mapping[str, float]) -> None:
        """numbers: the row's, by their full names, at least one."""
        ...

    def flush(self) -> None:
        """Called when the file holds no more rows for now."""
        ...

    def close(self, *, is_complete: bool) -> None:
        """Returns once everything is stored. is_complete: whether the run ended as it should."""
        ...


def open_writer(task: SinkTask) -> SinkWriter:
    """Imports the tool and opens the run in it."""
    return _WRITERS[task.sink](task)


def numbers_of(row: MetricsRow) -> dict[str, float]:
    """The row's numbers by `phase/name`; NaN and infinities are numbers, bools are not."""
    return {
        f"{row.phase}/{name}": float(value)
        for name, value in row.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoardWriter:
    """One event file with every row, each at its own step and time.

    A resumed run takes steps again, and TensorBoard can only forget all series from a step on, the warm start's with
    the others'. So a new file begins with a mark that makes TensorBoard forget everything before it, and repeats every
    row. The file before it stays: a TensorBoard that is reading it comes to the new one from there only.
    """

    starts_empty: ClassVar[bool] = True

    def __init__(self, task: SinkTask) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._types: Any = import_module("tensorboard.compat.proto.event_pb2")  # made when imported: no static types
        folder = Path(task.tensorboard_dir)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".ratoon-{task.run_id}"
        former = sorted(folder.glob(f"events.out.tfevents.*{suffix}"))
        self._superseded = former[:-1]
        # Files are read in the order of their names: later than the former ones, whatever the clock says now.
        begun_s = max([int(time.time()), *(_begun_s(path) + 1 for path in former)])
        path = folder / f"events.out.tfevents.{begun_s:010d}.{socket.gethostname()}{suffix}"
        self._records = RecordWriter(path.open("xb"))
        self._put(self._types.Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = self._types.SessionLog(status=self._types.SessionLog.START)
        self._put(self._types.Event(wall_time=time.time(), step=0, session_log=start))

    def write(self, row: MetricsRow, numbers: Mapping[str, float]) -> None:
        event = self._types.Event(wall_time=row.unix_s, step=row.step)
        for name, number in numbers.items():
            event.summary.value.add(tag=name, simple_value=number)
        self._put(event)

    def flush(self) -> None:
        self._records.flush()
        for path in self._superseded:
            path.unlink(missing_ok=True)
        self._superseded.clear()

    def close(self, *, is_complete: bool) -> None:
        self.flush()
        self._records.close()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class WandbWriter:
    """One wandb run, found again by its id. Steps are an axis of each phase: wandb's own counter cannot go back."""

    starts_empty: ClassVar[bool] = False

    def __init__(self, task: SinkTask) -> None:
        import wandb

        self._run = wandb.init(
            project=task.project,
            entity=task.entity,
            group=task.group,
            name=task.run_name,
            id=task.run_id,
            resume="allow",
            dir=task.run_dir,
            config=_recipe(task),
            settings=wandb.Settings(console="off", x_stats_pid=task.parent_pid),
        )
        self._phases: set[str] = set()

    def write(self, row: MetricsRow, numbers: Mapping[str, float]) -> None:
        axis = f"{row.phase}/step"
        if row.phase not in self._phases:
            self._phases.add(row.phase)
            self._run.define_metric(axis)
            self._run.define_metric(f"{row.phase}/*", step_metric=axis)
        self._run.log({**numbers, axis: row.step})

    def flush(self) -> None:
        pass

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


class TrackioWriter:
    """One trackio run. Trackio knows runs by name, and names may come again after --fresh: the id is part of it."""

    starts_empty: ClassVar[bool] = False

    def __init__(self, task: SinkTask) -> None:
        import trackio

        self._run = trackio.init(
            project=task.project,
            name=f"{task.run_name}-{task.run_id}",
            group=task.group,
            config=_recipe(task),
            resume="allow",
            embed=False,
        )

    def write(self, row: MetricsRow, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=row.step)

    def flush(self) -> None:
        pass

    def close(self, *, is_complete: bool) -> None:
        self._run.finish()


_WRITERS: Mapping[SinkName, type[TensorBoardWriter] | type[WandbWriter] | type[TrackioWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
}


def _begun_s(path: Path) -> int:
    with suppress(ValueError):
        return int(path.name.split(".")[3])
    return 0


def _recipe(task: SinkTask) -> dict[str, Any]:
    """The resolved recipe, for the tool to show; empty for a run without one."""
    with suppress(OSError, ValueError):
        return tomllib.loads(Path(task.run_dir, "recipe.toml").read_text(encoding="utf-8"))
    return {}
