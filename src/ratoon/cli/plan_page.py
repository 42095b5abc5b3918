"""The page that `ratoon plan` prints."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from ratoon.config.loading import dump_recipe
from ratoon.config.recipe import Recipe
from ratoon.loop.dry_run import DryRun
from ratoon.loop.memory_policy import FASTEST_FIRST
from ratoon.loop.run_memory import RunMemory, engine_of
from ratoon.planner.memory_sizes import GIB


def page_lines(found: DryRun, *, recipe_file: Path, full: bool) -> Iterator[str]:
    """Every line, in order: recipe, data, step, rollout, model, memory, checks, run folder, warnings."""
    yield f"Plan of run {found.recipe.run.name} ({recipe_file}). No weights were loaded, and nothing was written."
    yield from ("", "Recipe" if full else "Recipe, where it differs from the defaults (--full shows every key)")
    yield from _indented(dump_recipe(found.recipe).splitlines() if full else non_default_lines(found.recipe))
    yield from ("", "Data")
    yield from _indented(found.data.lines())
    yield from ("", "One step")
    yield from _indented(_step_lines(found))
    yield from _table(found)
    yield from ("", "Rollout")
    yield from _indented(_rollout_lines(found))
    yield from ("", "Model")
    yield from _indented(_model_lines(found))
    if found.memory is not None:
        yield from ("", "Memory, estimated" + (", of each rank" if found.mesh.num_ranks > 1 else ""))
        yield from _indented(_memory_lines(found, found.memory))
    yield from ("", "Checked now")
    yield from _indented(_check_lines(found))
    yield from ("", "Run folder")
    yield from _indented(_run_lines(found))
    for warning in found.warnings():
        yield f"warning: {warning}"


def non_default_lines(recipe: Recipe) -> list[str]:
    """`section.key = value` for each key that differs from its default, those that another key sets included."""
    return [f"{key} = {_toml(value)}" for key, value in _differences(recipe, "")]


def _differences(config: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in type(config).model_fields.items():
        value, key = getattr(config, name), f"{prefix}{name}"
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from _differences(value, f"{key}.")
        elif value is not None and (field.is_required() or value != default):
            yield key, value


def _toml(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        tables = [", ".join(f"{key} = {_toml(inner)}" for key, inner in _differences(item, "")) for item in value]
        return f"[{', '.join(f'{{ {table} }}' for table in tables)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _step_lines(found: DryRun) -> Iterator[str]:
    recipe = found.recipe
    rollout, algorithm = recipe.rollout, recipe.algorithm
    updates = algorithm.num_minibatches
    mesh = found.mesh
    ranks = _count(mesh.num_ranks, "rank") if mesh.axes is None else f"{mesh.num_ranks} processes: {mesh.axes}"
    yield (
        f"{rollout.prompts_per_step:,} prompts x {rollout.group_size:,} responses = {rollout.responses_per_step:,} "
        f"sequences a step. Both numbers are global: for all ranks together (this run has {ranks})."
    )
    yield (
        "rollout.prompts_per_step counts prompts, not sequences: it is multiplied by rollout.group_size, never divided "
        "by it."
    )
    per_update = rollout.prompts_per_step / updates
    yield (
        f"They make {_count(updates, 'optimizer update')}"
        + (f" of {per_update:g} prompts each on average" if updates > 1 else "")
        + " (algorithm.num_minibatches)."
    )
    yield (
        f"Each {'rank' if mesh.axes is None else 'data rank'} computes its share of an update in microbatches of "
        f"at most {recipe.planner.max_rows_per_microbatch:,} rows (planner.max_rows_per_microbatch). "
        "A row is one token slot; "
        + ("a prompt counts once for all its responses in a microbatch." if recipe.planner.share_prompts else
           "without planner.share_prompts, a prompt counts once for each response.")
    )  # fmt: skip
    yield "How an update is cut changes memory and speed, not the loss: it divides by the whole update's counts."
    if algorithm.dynamic_sampling:
        yield (
            f"Groups with all-equal rewards are replaced, in up to {algorithm.max_sampling_rounds} rollouts a step "
            "(algorithm.dynamic_sampling): more responses may be drawn than trained on."
        )
    taken = recipe.trainer.num_steps * rollout.prompts_per_step
    yield (
        f"{_count(recipe.trainer.num_steps, 'step')} take {taken:,} prompts: {taken / found.data.num_train:.3g} times "
        f"the {found.data.num_train:,} there are to train on."
    )


def _table(found: DryRun) -> Iterator[str]:
    limit = found.recipe.rollout.max_response_tokens
    heads = [
        f"all {step.response_tokens:,}{' (the limit)' if step.response_tokens == limit else ''}" for step in found.steps
    ]
    rows = {
        "if responses have tokens": heads,
        "rows a step": [f"{step.num_rows:,}" for step in found.steps],
        "tokens of separate sequences": [f"{step.num_logical_tokens:,}" for step in found.steps],
        "dedup ratio": [f"{step.dedup_ratio:.2f}" for step in found.steps],
        "FLOPs saved: separate / shared": [f"{step.flop_ratio:.2f}" for step in found.steps],
        "microbatches an update, each rank": [f"{step.num_microbatches:,}" for step in found.steps],
        "rows of the largest": [f"{step.largest_microbatch_rows:,}" for step in found.steps],
    }
    for name, cells in rows.items():
        yield f"  {name:<36}" + "".join(f"{cell:>22}" for cell in cells)


def _rollout_lines(found: DryRun) -> Iterator[str]:
    """Which engine, the memory it takes, and in how many steps a response may be drawn."""
    rollout = found.recipe.rollout
    engine = engine_of(found.recipe, found.device_type)
    match engine:
        case "transformers" | "paged":
            how = "transformers' continuous batching" if engine == "transformers" else "a paged cache of ours"
            is_cut = found.memory is not None and found.memory.shards.num_shards > 1
            weights = "a whole copy of its weights" if is_cut else "its own weights"
            yield f"engine {engine}: {how}, in the process that trains, on {weights}"
            yield from _cache_lines(found)
        case "vllm":
            yield "engine vllm: vLLM in the process that trains, on a copy of the weights"
            yield from _vllm_lines(found)
        case "vllm-server" | "sglang-server":
            server = rollout.server
            where = f"at {server.url}" if server.url is not None else "that each rank starts with the run"
            yield f"engine {engine}: a server {where}; its weights and cache are in none of the figures here"
    part = rollout.max_new_tokens_per_step
    if part is not None:
        yield (
            f"partial rollouts: at most {_count(part, 'token')} of a response a step, so that one of "
            f"{rollout.max_response_tokens:,} takes {rollout.max_parts:,} steps, each under the weights of then "
            "(rollout.max_new_tokens_per_step). A step trains on groups of which every response ended; fewer than "
            f"{(rollout.max_parts + 1) * rollout.prompts_per_step:,} groups are held at a time."
        )


def _cache_lines(found: DryRun) -> Iterator[str]:
    if found.memory is None:
        return
    size, rollout = found.memory.generation, found.recipe.rollout
    why = (
        "as rollout.cache_tokens says"
        if rollout.cache_tokens is not None
        else "what the longest prompts and responses can fill (rollout.cache_tokens would cap it)"
    )
    each = " on each rank" if found.mesh.num_ranks > 1 else ""
    cache = found.memory.at_worst(FASTEST_FIRST[-1]).cache
    yield f"up to {_count(size.num_concurrent, 'response')} at a time{each} (rollout.max_concurrent_responses)"
    yield f"key/value cache{each}: {size.cache_tokens:,} tokens, {_size(cache)}: {why}"


def _vllm_lines(found: DryRun) -> Iterator[str]:
    vllm = found.recipe.rollout.vllm
    if found.device_type == "cpu":
        yield f"key/value cache: {_size(int((vllm.cache_gib or 1.0) * GIB))} (rollout.vllm.cache_gib)"
        return
    share = "" if found.device is None else f", {_size(int(vllm.gpu_memory_utilization * found.device.total_bytes))}"
    cache = "what its weights leave of that" if vllm.cache_gib is None else _size(int(vllm.cache_gib * GIB))
    kept = "kept during updates" if vllm.sleep == 0 else "given to the trainer during updates"
    yield (
        f"it takes {vllm.gpu_memory_utilization:.0%} of each GPU{share} (rollout.vllm.gpu_memory_utilization), "
        f"{kept} (rollout.vllm.sleep = {vllm.sleep}); key/value cache: {cache}"
    )


def _model_lines(found: DryRun) -> Iterator[str]:
    model, config = found.model, found.recipe.model
    where = config.path if config.path is not None else "made on the spot"
    if model.num_parameters is None or found.num_active_parameters is None:
        yield f"{found.outline.model_type} ({where}); its own code would have to count its parameters"
    else:
        tied = ", embedding and head tied" if model.shape.tied_embeddings else ""
        active = ""
        if model.shape.num_experts:
            active = (
                f"; a token meets {_amount(found.num_active_parameters)} of them "
                f"({model.shape.experts_per_token} of {model.shape.num_experts} experts)"
            )
        yield f"{found.outline.model_type} ({where}): {_amount(model.num_parameters)} parameters{tied}{active}"
        trained = model.num_trained or 0
        if config.lora is not None:
            yield f"trained: {_amount(trained)} in adapters of rank {config.lora.rank}; the rest stays frozen"
    yield f"computes in {config.dtype} on {found.device_type}, recompute = {config.recompute}"
    for kind in found.attention:
        layers = _count(kind.num_layers, "layer") + (f" with a window of {kind.window:,}" if kind.window else "")
        chosen = kind.impl or "not known here"
        yield f"attention of {layers}: {chosen}; {kind.reason}"


def _memory_lines(found: DryRun, memory: RunMemory) -> Iterator[str]:
    """What the mode that would run takes, by what holds it; then the peak of each mode."""
    chosen = found.recompute or FASTEST_FIRST[-1]
    estimate = memory.at_worst(chosen)
    parts = {
        "weights": estimate.weights,
        "reference model": estimate.reference,
        "float32 masters" if memory.shards.num_shards == 1 else "float32 weights, a part": estimate.masters,
        "Adam's moments": estimate.moments,
        "key/value cache of the rollout": estimate.cache,
        "whole copy to sample from": estimate.sampling_copy,
        "weights gathered for a layer": estimate.gathered,
        "gradients": estimate.gradients,
        "activations of the largest microbatch": estimate.activations,
        "working space of backward": estimate.scratch,
    }
    shared = "" if memory.num_sharers == 1 else f", shared out over {memory.num_sharers} ranks"
    yield (
        f"with recompute {chosen}, at {memory.worst.num_rows:,} rows of which {memory.worst.num_scored:,} are scored"
        f"{shared}:"
    )
    for name, num_bytes in parts.items():
        if num_bytes:
            yield f"{name:<38}{_size(num_bytes):>10}"
    if estimate.on_host:
        yield f"{'in host memory, for the optimizer':<38}{_size(estimate.on_host):>10}"
    yield from _mode_lines(found, memory)


def _mode_lines(found: DryRun, memory: RunMemory) -> Iterator[str]:
    device = found.device
    for mode in FASTEST_FIRST:
        estimate = memory.at_worst(mode)
        fits = ""
        if device is not None:
            fits = "fits" if estimate.peak_bytes <= device.usable_bytes else "does not fit"
        taken = ", taken" if mode == found.recompute else ""
        yield (
            f"{'highest with recompute ' + mode:<38}{_size(estimate.peak_bytes):>10}  in {estimate.peak_phase}"
            + (f"; {fits}" if fits else "")
            + taken
        )
    if device is None:
        yield (
            "Python and libraries come on top: about 1 GiB. This machine has no GPU, so nothing says what fits; "
            "--gpu-memory-gib G holds these figures against GPUs of G GiB."
        )
    else:
        yield (
            f"An estimate may fill {_size(device.usable_bytes)} of {_size(device.total_bytes)}, {_whose(found)}: "
            f"{device.margin}."
        )


def _whose(found: DryRun) -> str:
    """The memory that estimates are held against."""
    if found.is_device_given:
        return "a GPU's as given (--gpu-memory-gib)"
    if found.device_type == "cpu":
        return "this machine's" if found.mesh.num_ranks == 1 else "one process's share of this machine's"
    return "this machine's GPU's" + (", which every rank's is taken to be like" if found.mesh.num_ranks > 1 else "")


def _check_lines(found: DryRun) -> Iterator[str]:
    recipe = found.recipe
    yield (
        f"room: the longest prompt ({found.data.lengths.maximum:,}) and response "
        f"({recipe.rollout.max_response_tokens:,}) have {found.longest_sequence:,} tokens, within "
        f"planner.max_rows_per_microbatch = {recipe.planner.max_rows_per_microbatch:,}"
        + ("" if found.outline.max_positions is None else f"; the model has {found.outline.max_positions:,} positions")
    )
    yield "reward: its functions load, and find what they ask for in the data"
    if found.checkpoint_bytes is not None:
        yield (
            f"disk: a checkpoint takes about {found.checkpoint_bytes / 1e9:.2f} GB, and "
            f"{recipe.trainer.keep_checkpoints:,} of them stay; {found.run.free_bytes / 1e9:.1f} GB are free"
        )


def _run_lines(found: DryRun) -> Iterator[str]:
    run = found.run
    match run.status:
        case "new":
            yield f"{run.named}: a new run"
        case "resumable":
            yield f"{run.named}: would resume after step {run.num_steps_done} of {found.recipe.trainer.num_steps}"
        case "complete":
            yield f"{run.named}: complete ({_count(run.num_steps_done, 'step')}); nothing would be done"
        case "unusable":
            yield f"{run.named}: `ratoon train` would stop here; see the end"


def _indented(lines: Iterator[str] | list[str] | tuple[str, ...]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _amount(count: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
