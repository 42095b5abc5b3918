"""What a recipe would do, found out without loading a weight or writing a file."""

# Shape letters: P prompt tokens, R response tokens.

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import psutil
import torch

from ratoon.attention import resolve_impl
from ratoon.config.recipe import Recipe
from ratoon.data import DataReport
from ratoon.loop.inputs import check_attention, load_inputs
from ratoon.loop.run_state import RunState, peek_run_folder
from ratoon.metrics.sinks import check_sinks
from ratoon.models import ModelPreview, preview_model
from ratoon.models.load import DTYPES
from ratoon.models.outline import ModelOutline, outline_model
from ratoon.planner import CostModel, GroupShape, StepPlan, plan_shapes
from ratoon.planner.memory import MemoryEstimate, estimate_memory
from ratoon.planner.memory_sizes import GenerationSize, MicrobatchSize, WeightsInMemory
from ratoon.rollout.engines.cache_budget import BLOCK_TOKENS, CacheLayout
from ratoon.trainer.checkpoint import FREE_BYTES_MARGIN
from ratoon.trainer.model_folder import FOLDER_BYTES
from ratoon.types.errors import UserError
from ratoon.types.model_shape import ModelShape

NUM_RANKS = 1
"""`ratoon train` runs in one process so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """One step whose responses all have the same length, on prompts of the data's own lengths."""

    response_tokens: int
    num_rows: int
    num_logical_tokens: int
    dedup_ratio: float

    flop_ratio: float
    """Useful work of the same step with every sequence by itself, over this one's."""

    num_microbatches: int
    """Of one update, on each rank; of the update that has most."""

    largest_microbatch_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForecast:
    """What some layers would run."""

    num_layers: int
    window: int | None
    impl: str | None
    """Which kernels, forward and backward. None where this machine lacks the device and cannot tell."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Everything `ratoon plan` says."""

    recipe: Recipe
    data: DataReport
    model: ModelPreview
    outline: ModelOutline
    device_type: str
    is_device_here: bool
    attention: tuple[AttentionForecast, ...]
    steps: tuple[StepForecast, ...]
    """With responses of half the limit, and of the limit."""

    longest_sequence: int
    """Tokens of the longest prompt, held-out ones included, and the longest response."""

    memory: MemoryEstimate | None
    """None where the number of weights is not known without the folder's own code."""

    machine_bytes: int | None
    """Memory of the device; None where it is not here."""

    checkpoint_bytes: int | None
    run: RunState

    @property
    def num_active_parameters(self) -> int | None:
        """Weights that one token meets."""
        if self.model.num_parameters is None:
            return None
        return self.model.num_parameters - _idle_expert_parameters(self.model.shape)

    def problems(self) -> tuple[str, ...]:
        """What `ratoon train` would refuse, though it can be planned for."""
        found = [self.run.problem] if self.run.problem else []
        if self.checkpoint_bytes is not None and self.run.free_bytes < self.checkpoint_bytes + FREE_BYTES_MARGIN:
            wanted = (self.checkpoint_bytes + FREE_BYTES_MARGIN) / 1e9
            found.append(
                f"a checkpoint in {self.run.named} needs {wanted:.2f} GB, and the disk has "
                f"{self.run.free_bytes / 1e9:.2f} GB free. Free some space, or set run.output_dir to a larger disk"
            )
        return tuple(found)

    def warnings(self) -> tuple[str, ...]:
        """What a person should judge before the run."""
        return tuple(_warnings(self))


def dry_run(recipe: Recipe, *, recipe_dir: Path) -> DryRun:
    """Reads the recipe's data, tokenizer, reward functions and model configuration.

    recipe_dir: files the recipe names are relative to it.

    Raises UserError as `ratoon train` does for whatever is wrong in them, but for a device or a run folder that
    cannot be used: those are part of the answer.
    """
    check_attention(recipe.model.attention)
    check_sinks(recipe.logging)
    model = preview_model(recipe.model)
    with load_inputs(recipe, recipe_dir) as inputs:
        prompts = inputs.prompts
    longest = prompts.report.lengths.maximum + recipe.rollout.max_response_tokens
    device_type, is_here = _device(recipe.trainer.device)
    outline = outline_model(recipe.model, device_type=device_type, longest_sequence=longest)
    R = recipe.rollout.max_response_tokens
    prompt_lengths = [prompt.num_tokens for prompt in prompts.train]
    steps = tuple(
        _forecast_step(recipe, prompt_lengths, model.shape, length) for length in dict.fromkeys((-(-R // 2), R))
    )
    return DryRun(
        recipe=recipe,
        data=prompts.report,
        model=model,
        outline=outline,
        device_type=device_type,
        is_device_here=is_here,
        attention=tuple(_attention(recipe, outline, is_here)),
        steps=steps,
        longest_sequence=longest,
        memory=_memory(recipe, model, outline, prompts.report, on_cuda=device_type == "cuda"),
        machine_bytes=machine_bytes(device_type) if is_here else None,
        checkpoint_bytes=_checkpoint_bytes(recipe, model),
        run=peek_run_folder(recipe, has_heldout=bool(prompts.heldout)),
    )


def machine_bytes(device_type: str) -> int:
    """Memory of the first GPU, or of this machine as far as its control group may use it."""
    if device_type == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() and os.access(limit, os.R_OK) else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _device(name: str) -> tuple[str, bool]:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    return name, name != "cuda" or has_cuda


def _attention(recipe: Recipe, outline: ModelOutline, is_here: bool) -> Iterator[AttentionForecast]:
    for kind in outline.layers:
        if not is_here:
            reason = "depends on the GPU, and this machine has none to ask; `ratoon doctor` there says what it takes"
            yield AttentionForecast(num_layers=kind.num_layers, window=kind.window, impl=None, reason=reason)
            continue
        try:
            choice = resolve_impl(kind.request, recipe.model.attention)
        except ValueError as error:
            raise UserError(f"{outline.model_type} cannot be trained on shared prompts: {error}") from None
        yield AttentionForecast(
            num_layers=kind.num_layers,
            window=kind.window,
            impl=choice.kernels,
            reason=choice.reason,
        )


def _forecast_step(
    recipe: Recipe, prompt_lengths: Sequence[int], shape: ModelShape, response_tokens: int
) -> StepForecast:
    rollout = recipe.rollout
    lengths = _typical_lengths(prompt_lengths, rollout.prompts_per_step)
    groups = [_group(index, P, response_tokens, rollout.group_size) for index, P in enumerate(lengths)]
    flops = CostModel.from_shape(shape, flops_per_s=1.0, seconds_per_microbatch=0.0)  # seconds are then FLOPs
    num_updates = recipe.algorithm.num_minibatches
    plans: list[tuple[list[GroupShape], StepPlan]] = []
    for first in range(num_updates):
        chosen = groups[first::num_updates]
        if not recipe.planner.share_prompts:
            chosen = [single for group in chosen for single in _singles(group)]
        plan = plan_shapes(
            chosen,
            num_ranks=NUM_RANKS,
            max_rows_per_microbatch=recipe.planner.max_rows_per_microbatch,
            cost=flops,
        )
        plans.append((chosen, plan))
    num_rows = sum(plan.num_rows for _, plan in plans)
    num_logical_tokens = sum(plan.num_logical_tokens for _, plan in plans)
    planned = sum(_planned_flops(chosen, plan, flops) for chosen, plan in plans)
    replicated = sum(
        flops.part_s(single.num_prompt_tokens, single.response_lengths) for g in groups for single in _singles(g)
    )
    return StepForecast(
        response_tokens=response_tokens,
        num_rows=num_rows,
        num_logical_tokens=num_logical_tokens,
        dedup_ratio=num_logical_tokens / num_rows,
        flop_ratio=replicated / planned,
        num_microbatches=max(plan.num_microbatches for _, plan in plans),
        largest_microbatch_rows=max(_largest_rows(chosen, plan) for chosen, plan in plans),
    )


def _typical_lengths(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths spread over all of them: the middles of as many equal parts of the sorted list."""
    ordered = sorted(lengths)
    return [ordered[(2 * index + 1) * len(ordered) // (2 * count)] for index in range(count)]


def _group(index: int, P: int, R: int, group_size: int) -> GroupShape:
    return GroupShape(prompt_id=index, num_prompt_tokens=P, response_lengths=(R,) * group_size)


def _singles(group: GroupShape) -> list[GroupShape]:
    P = group.num_prompt_tokens
    return [_group(index, P, R, 1) for index, R in enumerate(group.response_lengths)]


def _planned_flops(groups: Sequence[GroupShape], plan: StepPlan, flops: CostModel) -> float:
    return sum(
        flops.part_s(groups[index].num_prompt_tokens, [groups[index].response_lengths[i] for i in responses])
        for rank in plan.assignment
        for microbatch in rank
        for index, responses in microbatch
    )


def _largest_rows(groups: Sequence[GroupShape], plan: StepPlan) -> int:
    return max(
        sum(
            groups[index].num_prompt_tokens + sum(groups[index].response_lengths[i] for i in responses)
            for index, responses in microbatch
        )
        for rank in plan.assignment
        for microbatch in rank
    )


def _memory(
    recipe: Recipe, model: ModelPreview, outline: ModelOutline, data: DataReport, *, on_cuda: bool
) -> MemoryEstimate | None:
    if model.num_parameters is None or model.num_trained is None:
        return None
    P, R, N = data.lengths.maximum, recipe.rollout.max_response_tokens, recipe.rollout.group_size
    groups_per_update = ceil(recipe.rollout.prompts_per_step / recipe.algorithm.num_minibatches)
    copies = 1 if recipe.planner.share_prompts else N
    rows_per_update = groups_per_update * (copies * P + N * R)
    limit = recipe.planner.max_rows_per_microbatch
    num_rows = min(limit, rows_per_update)
    own_weights = recipe.model.lora is None
    return estimate_memory(
        model.shape,
        WeightsInMemory(
            num_parameters=model.num_parameters + (0 if own_weights else model.num_trained),
            num_trainable_parameters=model.num_trained,
            dtype_bytes=DTYPES[recipe.model.dtype].itemsize,
            num_reference_parameters=model.num_parameters if recipe.algorithm.needs_reference and own_weights else 0,
        ),
        MicrobatchSize(
            num_rows=num_rows,
            num_scored=min(num_rows, groups_per_update * N * R),
            recompute=recipe.model.recompute,
            has_qk_norm=outline.has_qk_norm,
            is_only_one=rows_per_update <= limit,
        ),
        GenerationSize(
            cache_tokens=_cache_tokens(recipe, model.shape, data),
            num_concurrent=min(recipe.rollout.max_concurrent_responses, _most_open_responses(recipe, data)),
        ),
        on_cuda=on_cuda,
    )


def _most_open_responses(recipe: Recipe, data: DataReport) -> int:
    return max(recipe.rollout.responses_per_step, data.num_heldout * recipe.evaluation.group_size)


def _cache_tokens(recipe: Recipe, shape: ModelShape, data: DataReport) -> int:
    """Tokens of the rollout engine's cache, averaged over layers, once its longest prompts have come."""
    rollout = recipe.rollout
    layout = _cache_layout(shape)
    if rollout.cache_tokens is not None:
        num_blocks = layout.tokens_to_blocks(rollout.cache_tokens)
    else:
        together = min(rollout.group_size, rollout.max_concurrent_responses)
        of_group = layout.blocks(data.lengths.maximum, rollout.max_response_tokens, together)
        num_open = min(rollout.max_concurrent_responses, _most_open_responses(recipe, data))
        num_blocks = ceil(of_group / together * num_open)
    return layout.blocks_to_tokens(num_blocks)


def _cache_layout(shape: ModelShape) -> CacheLayout:
    """As continuous batching groups layers: groups of one kind, all as large as the largest common divisor."""
    windows = shape.windows or (None,) * shape.num_layers
    sliding = [window for window in windows if window is not None]
    num_full = len(windows) - len(sliding)
    per_group = _common_divisor(num_full, len(sliding))
    return CacheLayout(
        block_tokens=BLOCK_TOKENS,
        num_full=num_full // per_group,
        num_sliding=len(sliding) // per_group,
        window=sliding[0] if sliding else None,
    )


def _common_divisor(left: int, right: int) -> int:
    while right:
        left, right = right, left % right
    return left


def _checkpoint_bytes(recipe: Recipe, model: ModelPreview) -> int | None:
    if model.num_parameters is None or model.num_trained is None:
        return None
    itemsize = DTYPES[recipe.model.dtype].itemsize
    weights = itemsize * (model.num_parameters if recipe.model.lora is None else model.num_trained)
    state = model.num_trained * (8 + (4 if itemsize < 4 else 0))
    return weights + state + FOLDER_BYTES


def _idle_expert_parameters(shape: ModelShape) -> int:
    """Of the experts that a token does not meet."""
    idle = max(shape.num_experts - max(shape.experts_per_token, 1), 0) if shape.num_experts else 0
    return shape.num_layers * idle * 3 * shape.hidden_size * shape.intermediate_size


def _warnings(found: DryRun) -> Iterator[str]:
    recipe = found.recipe
    if not found.is_device_here:
        yield f'trainer.device = "{found.device_type}", but torch finds no CUDA device here: this machine cannot run it'
    if found.memory is not None and found.machine_bytes is not None:
        share = found.memory.peak_bytes / found.machine_bytes
        if share > 0.85:
            verb = "is over" if share > 1 else "nearly fills"
            yield (
                f"the estimate {verb} the {found.machine_bytes / 2**30:.0f} GiB of this machine's "
                f"{'GPU' if found.device_type == 'cuda' else 'memory'}; lower planner.max_rows_per_microbatch, set "
                "model.recompute, rollout.cache_tokens or model.dtype, or take a smaller model"
            )
    limit = found.outline.max_positions
    if limit is not None and found.longest_sequence > limit and recipe.model.fresh is None:
        yield (
            f"the longest prompt and response have {found.longest_sequence:,} tokens, and the model's configuration "
            f"names {limit:,} positions (max_position_embeddings): beyond them it is untrained"
        )
    if found.checkpoint_bytes is not None:
        most = (recipe.trainer.keep_checkpoints + 1) * found.checkpoint_bytes
        if most > found.run.free_bytes + found.run.checkpoint_bytes:
            yield (
                f"up to {recipe.trainer.keep_checkpoints + 1} checkpoints stand side by side, {most / 1e9:.1f} GB, and "
                f"the disk has {found.run.free_bytes / 1e9:.1f} GB free; free some space, or lower "
                "trainer.keep_checkpoints"
            )
    num_prompts = recipe.trainer.num_steps * recipe.rollout.prompts_per_step
    if recipe.rollout.prompts_per_step > found.data.num_train:
        yield (
            f"a step takes {recipe.rollout.prompts_per_step:,} prompts, more than the {found.data.num_train:,} there "
            "are to train on: some stand in a step more than once"
        )
    elif num_prompts > 50 * found.data.num_train:
        yield f"each prompt is seen {num_prompts / found.data.num_train:.0f} times; the policy may learn them by heart"
