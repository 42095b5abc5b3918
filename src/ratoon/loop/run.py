"""A whole run: opened, begun or resumed, trained, and summed up."""

import asyncio
import math
import os
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ratoon.config.recipe import Recipe
from ratoon.distributed import CollectiveError, DataParallel, OtherRankError, on_each, on_each_kept, on_main
from ratoon.loop.device_memory import DeviceMemory
from ratoon.loop.inputs import Inputs, check_attention, check_rollout, load_inputs, load_model, resolve_device
from ratoon.loop.memory_policy import MemoryChoice, choose_recompute
from ratoon.loop.memory_watch import MemoryWatch
from ratoon.loop.mesh import MeshShape, join_sequence_group
from ratoon.loop.ranks import check_waits, cuts_model, joined, open_shared_run_folder, run_view
from ratoon.loop.reference import build_reference, keep_reference
from ratoon.loop.run_folder import RunFolder
from ratoon.loop.run_memory import RunMemory, engine_of, left_by_engine
from ratoon.loop.stop_rules import EXIT_STOPPED
from ratoon.loop.synchronous import SynchronousRun
from ratoon.metrics import MetricsLog, read_metrics
from ratoon.metrics.rows import MetricValue
from ratoon.metrics.sinks import Sinks, check_sinks
from ratoon.models import attention_choices, describe_adapters, is_compiled, preview_model, set_sequence_parallel
from ratoon.models.outline import outline_model
from ratoon.models.sharding import sampling_copy, shard_policy
from ratoon.rewards.messages import Cause
from ratoon.rollout import RolloutEngine, build_engine, engine_notes
from ratoon.trainer.best_checkpoint import best_step
from ratoon.trainer.checkpoint import checkpoint_name, checkpoint_step, clean_leftovers, latest_checkpoint
from ratoon.trainer.durable_files import is_disk_full
from ratoon.trainer.reference import ReferenceScore
from ratoon.types.errors import UserError, first_cause
from ratoon.view import RunLog, RunSummary, RunView


def train(recipe: Recipe, *, recipe_dir: Path, command: str, fresh: bool = False) -> int:
    """Trains as `recipe` says, or goes on where its run folder stands. Returns the exit status.

    recipe_dir: files the recipe names are relative to it. command: what the user typed, for the final page.
    fresh: sets an existing run of that name aside and starts anew.

    Raises UserError for what the user must change, before a model loads wherever that can be known.
    Any other failure ends the run with its cause named; its traceback stands in run.log.
    """
    started = time.monotonic()
    disable_progress_bar()  # transformers would draw one over ours for every checkpoint
    with joined(recipe) as ranks:
        loaded = on_each_kept(ranks, "inputs of a run", lambda: _checked_inputs(recipe, recipe_dir, ranks))
        with (
            loaded as inputs,
            open_shared_run_folder(recipe, ranks, fresh=fresh) as folder,
            _failures_named(folder, ranks) as log,
            run_view(recipe, ranks, log) as view,
            _metrics_log(recipe, folder, view, ranks) as metrics,
        ):

            def begin() -> tuple[Path | None, bool]:
                checkpoint = _checkpoint_to_go_on_from(recipe_dir, inputs, folder, view, metrics)
                return checkpoint, _is_complete(recipe, inputs, checkpoint, metrics)

            checkpoint, is_complete = on_main(ranks, "state of the run", begin)
            if is_complete:
                view.say(_complete_message(recipe, folder, checkpoint))
                return 0
            on_main(ranks, "recipe of the run", lambda: folder.store_recipe(recipe))
            _say_what_it_begins_with(view, folder, inputs)
            run = _load_run(recipe, inputs, checkpoint, folder=folder, metrics=metrics, view=view, ranks=ranks)
            with _stop_on_signals(run, view.warn) as received:
                asyncio.run(_begin_or_resume(run, checkpoint))
            number = int(ranks.all_reduce_maxima({"signal": float(received[0] if received else 0)})["signal"])

            def end() -> int:
                view.finish(_summary(run, folder, metrics, command=command, started=started))
                return _exit_status(run, metrics, number)

            return on_main(ranks, "end of the run", end)


def _checked_inputs(recipe: Recipe, recipe_dir: Path, ranks: DataParallel) -> Inputs:
    check_attention(recipe.model.attention)
    check_sinks(recipe.logging)
    check_rollout(recipe, is_evaluated=recipe.data.num_heldout > 0)
    check_waits(recipe, ranks.world_size)
    MeshShape.of(recipe, ranks.world_size)
    return load_inputs(recipe, recipe_dir, scores=ranks.is_main)


def _metrics_log(recipe: Recipe, folder: RunFolder, view: RunView, ranks: DataParallel) -> MetricsLog:
    if not ranks.is_main:
        return MetricsLog(None)
    return MetricsLog(folder.metrics, warn=view.warn, sinks=_sinks(recipe, folder, view))


def _checkpoint_to_go_on_from(
    recipe_dir: Path, inputs: Inputs, folder: RunFolder, view: RunView, metrics: MetricsLog
) -> Path | None:
    """On rank 0, which also makes the folder ready to be written."""
    folder.store_origin(recipe_dir)
    assert inputs.rewards is not None, "rank 0 scores"
    inputs.rewards.show_output(folder.rewards_log)
    clean_leftovers(folder.checkpoints)
    checkpoint = latest_checkpoint(folder.checkpoints, warn=view.warn)
    if checkpoint is None and metrics.find("train") is not None:
        raise UserError(
            f"run folder {folder.named} records steps, but {folder.shown(folder.checkpoints)} holds no "
            "checkpoint to go on from; put one back, or start anew with --fresh (the old run is set aside)"
        )
    if checkpoint is not None:
        _warn_of_lost_rows(checkpoint_step(checkpoint) or 0, folder, view)
    return checkpoint


def _warn_of_lost_rows(num_steps_done: int, folder: RunFolder, view: RunView) -> None:
    """Every step done has a row, unless someone took it."""
    known = {row.step for row in read_metrics(folder.metrics) if row.phase == "train"}
    lost = [step for step in range(1, num_steps_done + 1) if step not in known]
    if lost:
        view.warn(
            f"{folder.shown(folder.metrics)} lacks the rows of {len(lost)} of the {num_steps_done} steps done, up to "
            f"step {lost[-1]}: the file was removed, emptied or cut. The run goes on, but [stop] rules, "
            "evaluation.keep_best and the final page know only the rows that are left; put the file back to have them"
        )


def _load_run(
    recipe: Recipe,
    inputs: Inputs,
    checkpoint: Path | None,
    *,
    folder: RunFolder,
    metrics: MetricsLog,
    view: RunView,
    ranks: DataParallel,
) -> SynchronousRun:
    """The run with its model and engine, before its first step."""
    device = resolve_device(recipe.trainer.device)
    fullest = left_by_engine(_fullest_device(ranks, device), recipe)
    choice = on_main(ranks, "choice by memory", lambda: _choose_recompute(recipe, inputs, fullest, ranks))
    view.say(choice.sentence)
    if choice.warning is not None:
        view.warn(choice.warning)
    recipe, memory = choice.applied_to(recipe), MemoryWatch(choice, device)
    view.phase("load model")
    model = on_each_kept(
        ranks,
        "loading of the model",
        lambda: load_model(recipe, inputs.tokenizer, checkpoint=checkpoint, device=device),
    )
    if recipe.model.lora is not None:
        view.say(describe_adapters(model))
    for line in attention_choices(model):
        view.say(f"attention: {line}")
    if is_compiled(model):
        view.say("layers: compiled at their first passes, which take up to a minute more")
    sampled = sampling_copy(model) if cuts_model(recipe, ranks.world_size) else model
    engine = build_engine(recipe.rollout, sampled, inputs.tokenizer, device, run_dir=folder.path)
    if recipe.rollout.engine == "auto":
        view.say(f"rollout: engine {engine_of(recipe, device.type)} (rollout.engine is auto)")
    for line in engine_notes(engine):
        view.say(f"rollout: {line}")
    if sampled is not model:
        on_each_kept(ranks, "cutting of the model", lambda: shard_policy(model))
    set_sequence_parallel(model, join_sequence_group(recipe, ranks, device))
    if ranks.world_size > 1:
        mesh = MeshShape(num_ranks=ranks.world_size, degree=recipe.trainer.sequence_parallel)
        view.say(_describe_ranks(mesh, is_cut=sampled is not model))
    return on_each_kept(
        ranks,
        "beginning of the run",
        lambda: SynchronousRun(
            recipe, inputs, model, engine,
            sampled=sampled, folder=folder, metrics=metrics, view=view, data_parallel=ranks, memory=memory,
        ),
    )  # fmt: skip


def _describe_ranks(mesh: MeshShape, *, is_cut: bool) -> str:
    held = "each holds a part of what trains, and a whole copy to sample from" if is_cut else "each holds all weights"
    return f"{mesh.num_ranks} processes train together: " + "; ".join(filter(None, (mesh.axes, held)))


def _exit_status(run: SynchronousRun, metrics: MetricsLog, signal_number: int) -> int:
    """signal_number: that stopped the run; 0 for none."""
    if _is_complete(run.recipe, run.inputs, run.newest_checkpoint, metrics):
        return 0
    if run.stop_reason is not None and not signal_number:
        return EXIT_STOPPED
    assert signal_number, "a run that nobody stopped is complete"
    return 128 + signal_number


def _say_what_it_begins_with(view: RunView, folder: RunFolder, inputs: Inputs) -> None:
    if folder.set_aside is not None:
        view.say(f"the old run {folder.named} is set aside in {folder.set_aside}")
    report = inputs.prompts.report
    for line in report.count_lines():
        view.say(line)
    for warning in report.warnings:
        view.warn(warning)


def _fullest_device(ranks: DataParallel, device: torch.device) -> DeviceMemory:
    """That of the rank which has the least room. Ranks of one host share its memory evenly."""
    found = on_each(ranks, "memory of every rank", lambda: (socket.gethostname(), DeviceMemory.here(device)))
    num_on_host = Counter(host for host, _ in found)
    return min((memory.shared_by(num_on_host[host]) for host, memory in found), key=lambda own: own.usable_bytes)


def _choose_recompute(recipe: Recipe, inputs: Inputs, device: DeviceMemory, ranks: DataParallel) -> MemoryChoice:
    """By the recipe, its data and the memory that is free now. Raises UserError where nothing fits.

    device: the rank's that has the least room.
    """
    report = inputs.prompts.report
    longest = report.lengths.maximum + recipe.rollout.max_response_tokens
    memory = RunMemory.of(
        recipe,
        preview_model(recipe.model),
        outline_model(recipe.model, device_type=device.device_type, longest_sequence=longest),
        report,
        on_cuda=device.device_type == "cuda",
        num_ranks=ranks.world_size if cuts_model(recipe, ranks.world_size) else 1,
    )
    return choose_recompute(recipe, memory, device)


class RunFailedError(RuntimeError):
    """The run ended by a failure that is not the user's to mend; the message names the cause and the log."""

    def __init__(self, message: str, *, is_another_ranks: bool) -> None:
        """is_another_ranks: this rank has only lost another one, which may have said why."""
        super().__init__(message)
        self.is_another_ranks = is_another_ranks


@contextmanager
def _failures_named(folder: RunFolder, ranks: DataParallel) -> Iterator[RunLog]:
    """The run's log. Whatever ends the run stands there with its traceback, and is raised under its first cause."""
    of_rank = "" if ranks.is_main else f"rank {ranks.rank}: "
    log = RunLog(folder.log)
    try:
        yield log
    except (KeyboardInterrupt, SystemExit):
        raise
    except OtherRankError as error:
        if ranks.is_main:
            with suppress(OSError):
                log(f"stopped by {error}")
        raise
    except BaseException as error:  # the user's functions may raise what is no Exception: asyncio.CancelledError
        with suppress(OSError):  # the disk may be what failed
            log(of_rank + traceback.format_exc())
        cause = ranks.named(first_cause(error))
        if isinstance(cause, UserError):
            raise cause from error
        if is_disk_full(cause):
            raise UserError(
                f"the disk that holds run folder {folder.named} is full ({cause}); checkpoints are whole. "
                "Free some space and run the same command again"
            ) from error
        is_another_ranks = isinstance(cause, CollectiveError)  # whose message names the rank
        said = str(cause) if is_another_ranks else f"{of_rank}{_described(cause)}"
        raise RunFailedError(f"{said} (traceback in {folder.log})", is_another_ranks=is_another_ranks) from error
    finally:
        log.close()


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:
        return f"{type(error).__name__}, whose message cannot be had ({type(failure).__name__})"


async def _begin_or_resume(run: SynchronousRun, checkpoint: Path | None) -> None:
    async with _closing(run.engine, run.view.warn):
        run.require_room()
        if checkpoint is not None:
            await run.restore(checkpoint)
            run.view.say(f"resuming after step {run.num_steps_done} from {run.folder.shown(checkpoint)}")
            run.use_reference(_reference(run))
        else:
            # Dropout draws from the global generators.
            torch.manual_seed(run.recipe.run.seed + run.data_parallel.rank)
            run.forget_after(-1)
            if run.recipe.sft is not None and not run.warm_start():
                run.view.warn("stopped in the warm start, which the same command begins anew")
                return
            on_main(
                run.data_parallel,
                "writing of the reference",
                lambda: keep_reference(run.recipe, run.sampled, run.inputs.tokenizer, run.folder),
            )
            run.use_reference(_reference(run))
            run.save()
            # An engine with weights of its own was built before the warm start; one that fails now does not lose that.
            await run.publisher.publish(0)
        # A run that failed in an evaluation still owes it.
        if (run.num_steps_done == 0 or run.is_evaluation_due) and not run.must_stop():
            await run.evaluate()
        await run.train()
        if run.stop_reason is not None:
            run.view.say(f"stopped by {run.stop_reason.rule}: {run.stop_reason.sentence}", "bold yellow")
        if not run.must_stop():
            await run.evaluate()


def _reference(run: SynchronousRun) -> ReferenceScore | None:
    return on_each_kept(
        run.data_parallel,
        "reference",
        lambda: build_reference(
            run.recipe,
            run.model,
            run.folder,
            device=run.model.device,
            is_sharded=run.sampled is not run.model,
        ),
    )


def _sinks(recipe: Recipe, folder: RunFolder, view: RunView) -> Sinks:
    return Sinks(recipe.logging, run_dir=folder.path, run_name=recipe.run.name, warn=view.warn, metrics=folder.metrics)


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
        f"run {recipe.run.name} is complete: {step} steps in {folder.named}{asked}. "
        "Raise trainer.num_steps to train on, or use --fresh to start anew"
    )


@contextmanager
def _stop_on_signals(run: SynchronousRun, warn: Callable[[str], None]) -> Iterator[Sequence[int]]:
    """Ctrl-C or SIGTERM ends the run after the step in progress, with a checkpoint; Ctrl-C (SIGINT) then, at once.

    Yields the signals received so far. In the warm start there is no checkpoint yet, and the run begins anew.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        run.is_stopping = True
        at_once = "Ctrl-C again stops" if number == signal.SIGINT else f"Ctrl-C, or `kill -INT {os.getpid()}`, stops"
        warn(f"{signal.Signals(number).name}: stopping after what is in progress; {at_once} at once")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _summary(
    run: SynchronousRun, folder: RunFolder, metrics: MetricsLog, *, command: str, started: float
) -> RunSummary:
    recipe = run.recipe
    rows = read_metrics(folder.metrics)
    steps = [row.values for row in rows if row.phase == "train"]
    # Those that lost every response have no reward to show.
    evaluations = [row for row in rows if row.phase == "evaluate" and _number(row.values, "num_responses")]
    before = next((row for row in evaluations if row.step == 0), None)
    after = next((row for row in reversed(evaluations) if row.step > 0), None)
    shown = before or after
    largest = _memory_of_the_largest(steps)
    seconds = metrics.total_seconds
    return RunSummary(
        run_name=recipe.run.name,
        run_dir=folder.named,
        train_command=command,
        num_steps_done=run.num_steps_done,
        num_steps=recipe.trainer.num_steps,
        seconds_by_phase=seconds,
        wall_s=max(sum(seconds.values()), time.monotonic() - started),
        num_logical_tokens=_total(steps, "num_logical_tokens"),
        num_computed_rows=_total(steps, "num_rows"),
        num_response_tokens=_total(steps, "num_generated_tokens"),
        reward_before=None if before is None else _number(before.values, "reward_mean"),
        reward_after=None if after is None else _number(after.values, "reward_mean"),
        reward_after_step=None if after is None else after.step,
        num_heldout_responses=0 if shown is None else int(_number(shown.values, "num_responses")),
        memory_peak_gib=largest.get("memory_peak_gib"),
        memory_predicted_gib=largest.get("memory_predicted_gib"),
        num_failures_by_cause=_failures_by_cause(steps),
        num_responses_dropped=_total(steps, "reward_dropped"),
        checkpoint=None if run.newest_checkpoint is None else folder.shown(run.newest_checkpoint),
        best_checkpoint=_best_checkpoint(recipe, folder),
        how_to_go_on=None if run.stop_reason is None else run.stop_reason.how_to_go_on,
    )


def _best_checkpoint(recipe: Recipe, folder: RunFolder) -> Path | None:
    step = best_step(folder.path) if recipe.evaluation.keep_best else None
    return None if step is None else folder.shown(folder.checkpoints / checkpoint_name(step))


def _total(rows: Sequence[Mapping[str, MetricValue]], name: str) -> int:
    return sum(int(_number(row, name)) for row in rows)


def _memory_of_the_largest(rows: Sequence[Mapping[str, MetricValue]]) -> dict[str, float]:
    """Peak and prediction of the step that took most; empty where none was measured."""
    names = ("memory_peak_gib", "memory_predicted_gib")
    largest = max(rows, key=lambda row: _number(row, names[0]), default={})
    return {name: _number(largest, name) for name in names if _number(largest, name)}


def _failures_by_cause(rows: Sequence[Mapping[str, MetricValue]]) -> dict[str, int]:
    """The most frequent first."""
    totals = {str(cause): _total(rows, f"reward_failures_{cause}") for cause in Cause}
    return {cause: count for cause, count in sorted(totals.items(), key=lambda item: -item[1]) if count}


def _number(row: Mapping[str, MetricValue], name: str) -> float:
    """0 where a row, which someone may have edited, has no number of that name."""
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0.0
