"""A whole run: opened, begun or resumed, trained, and summed up."""

import asyncio
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ratoon.config.recipe import Recipe
from ratoon.distributed import single_process
from ratoon.loop.inputs import Inputs, check_attention, load_inputs, load_model, resolve_device
from ratoon.loop.run_folder import RunFolder, open_run_folder
from ratoon.loop.synchronous import SynchronousRun
from ratoon.metrics import MetricsLog, read_metrics
from ratoon.metrics.rows import MetricValue
from ratoon.rollout import RolloutEngine, build_engine
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
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"`ratoon train` runs in one process so far, but WORLD_SIZE is {world_size!r}; start it without torchrun"
        )
    started = time.monotonic()
    disable_progress_bar()  # transformers would draw one over ours for every checkpoint
    device = resolve_device(recipe.trainer.device)
    check_attention(recipe.model.attention)
    inputs = load_inputs(recipe, recipe_dir)
    folder = open_run_folder(recipe, fresh=fresh)
    log = RunLog(folder.log)
    with folder, RunView(recipe.run.name, log=log) as view, MetricsLog(folder.metrics, warn=view.warn) as metrics:
        try:
            clean_leftovers(folder.checkpoints)
            checkpoint = latest_checkpoint(folder.checkpoints, warn=view.warn)
            if checkpoint is None and metrics.find("train") is not None:
                raise UserError(
                    f"run folder {folder.path} records steps, but {folder.checkpoints} holds no checkpoint to go on "
                    "from; put one back, or start anew with --fresh (the old run is set aside)"
                )
            if _is_complete(recipe, inputs, checkpoint, metrics):
                view.say(_complete_message(recipe, folder, checkpoint))
                return 0
            folder.store_recipe(recipe)
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
            return 0 if _is_complete(recipe, inputs, run.newest_checkpoint, metrics) else EXIT_INTERRUPTED
        except Exception as error:
            log(traceback.format_exc())
            cause = _first_cause(error)
            if isinstance(cause, UserError):
                raise cause from error
            raise RunFailedError(f"{type(cause).__name__}: {cause} (traceback in {folder.log})") from error
        finally:
            log.close()


class RunFailedError(RuntimeError):
    """The run ended by a failure that is not the user's to mend; the message names the cause and the log."""


async def _begin_or_resume(run: SynchronousRun, checkpoint: Path | None) -> None:
    async with _closing(run.engine, run.view.warn):
        if checkpoint is not None:
            await run.restore(checkpoint)
            run.view.say(f"resuming after step {run.num_steps_done} from {checkpoint}")
        else:
            torch.manual_seed(run.recipe.run.seed)  # dropout draws from the global generators
            run.metrics.truncate_after(-1)
            run.folder.remove_rollouts_after(0)
            if run.recipe.sft is not None and not run.warm_start():
                run.view.warn("stopped in the warm start, which the same command begins anew")
                return
            run.save()
        if run.num_steps_done == 0 and not run.is_stopping:
            await run.evaluate()
        await run.train()
        if not run.is_stopping:
            await run.evaluate()


@asynccontextmanager
async def _closing(engine: RolloutEngine, warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Closes the engine in the end. An engine that failed may fail to close too: the first failure is the cause."""
    try:
        yield
    except BaseException:
        try:
            await engine.close()
        except Exception as error:
            warn(f"the rollout engine did not close either: {error}")
        raise
    await engine.close()


def _is_complete(recipe: Recipe, inputs: Inputs, checkpoint: Path | None, metrics: MetricsLog) -> bool:
    """Trained to the last step, and evaluated there: a run killed in between still owes its evaluation."""
    step = None if checkpoint is None else checkpoint_step(checkpoint)
    if step is None or step < recipe.trainer.num_steps:
        return False
    return not inputs.prompts.heldout or metrics.find("evaluate", step) is not None


def _complete_message(recipe: Recipe, folder: RunFolder, checkpoint: Path | None) -> str:
    step, num_steps = checkpoint_step(checkpoint) if checkpoint else 0, recipe.trainer.num_steps
    asked = f", where trainer.num_steps = {num_steps} asks for no more" if step != num_steps else ""
    return (
        f"run {recipe.run.name} is complete: {step} steps in {folder.path}{asked}. "
        "Raise trainer.num_steps to train on, or use --fresh to start anew"
    )


def _first_cause(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group of them: concurrent tasks fail as a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _stop_on_interrupt(run: SynchronousRun, warn: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C ends the run after the step in progress, with a checkpoint; a second one ends it at once.

    In the warm start there is no checkpoint yet, and the run begins anew.
    """

    def stop(*_: object) -> None:
        if run.is_stopping:
            raise KeyboardInterrupt
        run.is_stopping = True
        warn("stopping after what is in progress; press Ctrl-C again to stop at once")

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
