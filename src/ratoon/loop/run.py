"""A whole run: opened, begun or resumed, trained, and summed up."""

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ratoon.config.recipe import Recipe
from ratoon.distributed import single_process
from ratoon.loop.inputs import Inputs, load_inputs, load_model, resolve_device
from ratoon.loop.run_folder import RunFolder, open_run_folder
from ratoon.loop.synchronous import SynchronousRun
from ratoon.metrics import MetricsLog, read_metrics
from ratoon.metrics.rows import MetricValue
from ratoon.rollout import build_engine
from ratoon.trainer.checkpoint import checkpoint_step, clean_leftovers, latest_checkpoint
from ratoon.types.errors import UserError
from ratoon.view import RunLog, RunSummary, RunView

EXIT_INTERRUPTED = 130


def train(recipe: Recipe, *, recipe_dir: Path, command: str, fresh: bool = False) -> int:
    """Trains as `recipe` says, or goes on where its run folder stands. Returns the exit status.

    recipe_dir: files the recipe names are relative to it. command: what the user typed, for the final page.
    fresh: sets an existing run of that name aside and starts anew.

    Raises UserError for what the user must change, before a model loads wherever that can be known.
    Any other failure ends the run with its cause named; its traceback stands in run.log.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "`ratoon train` runs in one process so far, but WORLD_SIZE is set above 1; start it without torchrun"
        )
    started = time.monotonic()
    disable_progress_bar()  # transformers would draw one over ours for every checkpoint
    device = resolve_device(recipe.trainer.device)
    inputs = load_inputs(recipe, recipe_dir)
    folder = open_run_folder(recipe, fresh=fresh)
    log = RunLog(folder.log)
    with RunView(recipe.run.name, log=log) as view, MetricsLog(folder.metrics, warn=view.warn) as metrics:
        try:
            clean_leftovers(folder.checkpoints)
            checkpoint = latest_checkpoint(folder.checkpoints, warn=view.warn)
            if _is_complete(recipe, inputs, checkpoint, metrics):
                view.say(
                    f"run {recipe.run.name} is complete: {recipe.trainer.num_steps} steps in {folder.path}. "
                    "Raise trainer.num_steps to train on, or use --fresh to start anew"
                )
                return 0
            for line in inputs.prompts.report.lines():
                view.say(line)
            view.phase("load model")
            model = load_model(recipe, inputs.tokenizer, checkpoint=checkpoint, device=device)
            engine = build_engine(recipe.rollout, model, inputs.tokenizer, device)
            run = SynchronousRun(
                recipe, inputs, model, engine,
                folder=folder, metrics=metrics, view=view, data_parallel=single_process(),
            )  # fmt: skip
            with _stop_on_interrupt(run, view.warn):
                asyncio.run(_begin_or_resume(run, checkpoint))
            view.finish(_summary(run, folder, metrics, command=command, started=started))
            return EXIT_INTERRUPTED if run.is_stopping and run.num_steps_done < recipe.trainer.num_steps else 0
        except UserError:
            raise
        except Exception as error:
            log(traceback.format_exc())
            raise RunFailedError(f"{type(error).__name__}: {error} (traceback in {folder.log})") from error


class RunFailedError(RuntimeError):
    """The run ended by a failure that is not the user's to mend; the message names the cause and the log."""


async def _begin_or_resume(run: SynchronousRun, checkpoint: Path | None) -> None:
    try:
        if checkpoint is not None:
            await run.restore(checkpoint)
            run.view.say(f"resuming after step {run.num_steps_done} from {checkpoint}")
        else:
            run.metrics.truncate_after(-1)
            if run.recipe.sft is not None:
                run.warm_start()
            run.save()
        if run.num_steps_done == 0:
            await run.evaluate()
        await run.train()
        if run.num_steps_done == run.recipe.trainer.num_steps:
            await run.evaluate()
    finally:
        await run.engine.close()


def _is_complete(recipe: Recipe, inputs: Inputs, checkpoint: Path | None, metrics: MetricsLog) -> bool:
    """Trained to the last step, and evaluated there: a run killed in between still owes its evaluation."""
    num_steps = recipe.trainer.num_steps
    if checkpoint is None or (checkpoint_step(checkpoint) or 0) < num_steps:
        return False
    return not inputs.prompts.heldout or metrics.find("evaluate", num_steps) is not None


@contextmanager
def _stop_on_interrupt(run: SynchronousRun, warn: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C ends the run after the step in progress, with a checkpoint; a second one ends it at once."""

    def stop(*_: object) -> None:
        if run.is_stopping:
            raise KeyboardInterrupt
        run.is_stopping = True
        warn("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _summary(
    run: SynchronousRun, folder: RunFolder, metrics: MetricsLog, *, command: str, started: float
) -> RunSummary:
    recipe = run.recipe
    rows = read_metrics(folder.metrics)
    steps = [row.values for row in rows if row.phase == "train"]
    evaluations = [row for row in rows if row.phase == "evaluate"]
    before = next((row.values for row in evaluations if row.step == 0), None)
    after = next((row.values for row in reversed(evaluations) if row.step == run.num_steps_done > 0), None)
    seconds = metrics.total_seconds
    return RunSummary(
        run_name=recipe.run.name,
        run_dir=folder.path,
        train_command=command,
        num_steps_done=run.num_steps_done,
        num_steps=recipe.trainer.num_steps,
        seconds_by_phase=seconds,
        wall_s=max(sum(seconds.values()), time.monotonic() - started),
        num_logical_tokens=_total(steps, "num_logical_tokens"),
        num_computed_rows=_total(steps, "num_rows"),
        num_response_tokens=_total(steps, "num_generated_tokens"),
        reward_before=None if before is None else float(before["reward_mean"] or 0.0),
        reward_after=None if after is None else float(after["reward_mean"] or 0.0),
        num_heldout_responses=0 if before is None else int(before["num_responses"] or 0),
        checkpoint=run.newest_checkpoint,
    )


def _total(rows: Sequence[Mapping[str, MetricValue]], name: str) -> int:
    return sum(int(row[name] or 0) for row in rows)
