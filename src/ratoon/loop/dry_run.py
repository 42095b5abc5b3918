"""What a recipe would do, found out without loading a weight or writing a file."""

# Shape letters: P prompt tokens, R response tokens.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ratoon.attention import resolve_impl
from ratoon.config.recipe import Recipe
from ratoon.data import DataReport
from ratoon.loop.device_memory import DeviceMemory, DeviceType
from ratoon.loop.inputs import check_attention, check_rollout, load_inputs
from ratoon.loop.memory_policy import choose_recompute, fitting_mode
from ratoon.loop.mesh import MeshShape
from ratoon.loop.ranks import check_waits, cuts_model
from ratoon.loop.run_memory import RunMemory, left_by_engine
from ratoon.loop.run_state import RunState, peek_run_folder
from ratoon.metrics.sinks import check_sinks
from ratoon.models import ModelPreview, preview_model
from ratoon.models.invariant import IMPL as INVARIANT
from ratoon.models.load import DTYPES
from ratoon.models.outline import ModelOutline, outline_model
from ratoon.planner import CostModel, GroupShape, StepPlan, plan_shapes
from ratoon.planner.memory_sizes import GIB, RecomputeMode, eight_bit_bytes
from ratoon.trainer.checkpoint import FREE_BYTES_MARGIN
from ratoon.trainer.model_folder import FOLDER_BYTES
from ratoon.types.errors import UserError
from ratoon.types.model_shape import ModelShape


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
    """Of one update, on each data rank; of the update that has most."""

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
    device_type: DeviceType
    is_device_here: bool
    attention: tuple[AttentionForecast, ...]
    steps: tuple[StepForecast, ...]
    """With responses of half the limit, and of the limit."""

    longest_sequence: int
    """Tokens of the longest prompt, held-out ones included, and the longest response."""

    mesh: MeshShape
    """Of the ranks that share a step; the model is cut over all of them where the recipe says so."""

    memory: RunMemory | None
    """None where the number of weights is not known without the folder's own code."""

    device: DeviceMemory | None
    """What one rank may count on. None where it is not here, and nobody has said what it has."""

    is_device_given: bool
    """`device` is what the caller said, and not this machine's."""

    checkpoint_bytes: int | None
    run: RunState

    @property
    def num_active_parameters(self) -> int | None:
        """Weights that one token meets."""
        if self.model.num_parameters is None:
            return None
        return self.model.num_parameters - _idle_expert_parameters(self.model.shape)

    @property
    def recompute(self) -> RecomputeMode | None:
        """What a run would compute again; None where "auto" cannot tell, or finds nothing that fits."""
        named = self.recipe.model.recompute
        if named != "auto":
            return named
        return None if self.memory is None or self.device is None else fitting_mode(self.memory, self.device)

    def problems(self) -> tuple[str, ...]:
        """What `ratoon train` would refuse, though it can be planned for."""
        found = [self.run.problem] if self.run.problem else []
        try:
            check_rollout(self.recipe, is_evaluated=self.recipe.data.num_heldout > 0, has_device=self.is_device_here)
        except UserError as error:
            found.append(str(error))
        if self.device is not None:
            try:
                choose_recompute(self.recipe, self.memory, self.device)
            except UserError as error:
                found.append(str(error))
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


def dry_run(
    recipe: Recipe,
    *,
    recipe_dir: Path,
    num_ranks: int = 1,
    on_gpus: bool = False,
    gpu_memory_gib: float | None = None,
) -> DryRun:
    """Reads the recipe's data, tokenizer, reward functions and model configuration.

    recipe_dir: files the recipe names are relative to it. num_ranks: that share each step.
    on_gpus: where the recipe leaves the device open, it is a GPU, here or not. gpu_memory_gib: of each, in place of
    what one here has.

    Raises UserError as `ratoon train` does for whatever is wrong in them, but for a device or a run folder that
    cannot be used: those are part of the answer.
    """
    device_type, is_here = _device(recipe.trainer.device, on_gpus=on_gpus or gpu_memory_gib is not None)
    if is_here:
        check_attention(recipe.model.attention)
    check_sinks(recipe.logging)
    check_waits(recipe, num_ranks)
    mesh = MeshShape.of(recipe, num_ranks)
    model = preview_model(recipe.model)
    with load_inputs(recipe, recipe_dir, device_type=device_type) as inputs:
        prompts = inputs.prompts
    longest = prompts.report.lengths.maximum + recipe.rollout.max_response_tokens
    if gpu_memory_gib is not None and device_type != "cuda":
        raise UserError('--gpu-memory-gib is of GPUs, and trainer.device = "cpu"; leave one of them out')
    outline = outline_model(recipe.model, device_type=device_type, longest_sequence=longest)
    R = recipe.rollout.max_response_tokens
    prompt_lengths = [prompt.num_tokens for prompt in prompts.train]
    steps = tuple(
        _forecast_step(recipe, prompt_lengths, model.shape, length, mesh) for length in dict.fromkeys((-(-R // 2), R))
    )
    return DryRun(
        recipe=recipe,
        data=prompts.report,
        model=model,
        outline=outline,
        device_type=device_type,
        is_device_here=is_here,
        attention=tuple(_attention(recipe, outline, device_type, is_here)),
        steps=steps,
        longest_sequence=longest,
        mesh=mesh,
        memory=RunMemory.of(
            recipe,
            model,
            outline,
            prompts.report,
            on_cuda=device_type == "cuda",
            num_ranks=num_ranks if cuts_model(recipe, num_ranks) else 1,
        ),
        device=_device_memory(recipe, device_type, is_here, num_ranks, gpu_memory_gib),
        is_device_given=gpu_memory_gib is not None,
        checkpoint_bytes=_checkpoint_bytes(recipe, model),
        run=peek_run_folder(recipe, has_heldout=bool(prompts.heldout)),
    )


def _device(name: str, *, on_gpus: bool) -> tuple[DeviceType, bool]:
    """Which, and whether it is here."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" or (name == "auto" and (on_gpus or has_cuda)):
        return "cuda", has_cuda
    return "cpu", True


def _device_memory(
    recipe: Recipe, device_type: DeviceType, is_here: bool, num_ranks: int, gpu_memory_gib: float | None
) -> DeviceMemory | None:
    if gpu_memory_gib is not None:
        return left_by_engine(DeviceMemory.of_total(device_type, int(gpu_memory_gib * GIB)), recipe)
    if not is_here:
        return None
    return left_by_engine(DeviceMemory.here(torch.device(device_type)).shared_by(num_ranks), recipe)


def _attention(
    recipe: Recipe, outline: ModelOutline, device_type: DeviceType, is_here: bool
) -> Iterator[AttentionForecast]:
    # On a CPU it is refused (`DryRun.problems`).
    named = INVARIANT if recipe.model.batch_invariant and device_type == "cuda" else recipe.model.attention
    for kind in outline.layers:
        if not is_here:
            reason = "depends on the GPU, and this machine has none to ask; `ratoon doctor` there says what it takes"
            yield AttentionForecast(num_layers=kind.num_layers, window=kind.window, impl=None, reason=reason)
            continue
        try:
            choice = resolve_impl(kind.request, named)
        except ValueError as error:
            raise UserError(f"{outline.model_type} cannot be trained on shared prompts: {error}") from None
        yield AttentionForecast(
            num_layers=kind.num_layers,
            window=kind.window,
            impl=choice.kernels,
            reason=choice.reason,
        )


def _forecast_step(
    recipe: Recipe, prompt_lengths: Sequence[int], shape: ModelShape, response_tokens: int, mesh: MeshShape
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
            num_ranks=mesh.num_data_ranks,
            max_rows_per_microbatch=recipe.planner.max_rows_per_microbatch,
            cost=flops,
            keeps_prompts=mesh.degree == 1 and not cuts_model(recipe, mesh.num_ranks),
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
    of_parts = sum(
        flops.part_s(groups[index].num_prompt_tokens, [groups[index].response_lengths[i] for i in responses])
        for rank in plan.assignment
        for microbatch in rank
        for index, responses in microbatch
    )
    kept = sum(
        (stop - start - 1) * float(flops.prompt_s(groups[rank[start][0][0]].num_prompt_tokens))
        for rank, runs in zip(plan.assignment, plan.kept_runs, strict=True)
        for start, stop in runs
    )
    return of_parts - kept


def _largest_rows(groups: Sequence[GroupShape], plan: StepPlan) -> int:
    return max(
        sum(
            groups[index].num_prompt_tokens + sum(groups[index].response_lengths[i] for i in responses)
            for index, responses in microbatch
        )
        for rank in plan.assignment
        for microbatch in rank
    )


def _checkpoint_bytes(recipe: Recipe, model: ModelPreview) -> int | None:
    if model.num_parameters is None or model.num_trained is None:
        return None
    itemsize = DTYPES[recipe.model.dtype].itemsize
    weights = itemsize * (model.num_parameters if recipe.model.lora is None else model.num_trained)
    is_eight_bit = recipe.trainer.optimizer_states == "8bit"
    moment = eight_bit_bytes(model.num_trained) if is_eight_bit else 4 * model.num_trained
    state = 2 * moment + (4 * model.num_trained if itemsize < 4 else 0)
    return weights + state + FOLDER_BYTES


def _idle_expert_parameters(shape: ModelShape) -> int:
    """Of the experts that a token does not meet."""
    idle = max(shape.num_experts - max(shape.experts_per_token, 1), 0) if shape.num_experts else 0
    return shape.num_layers * idle * 3 * shape.hidden_size * shape.intermediate_size


def _warnings(found: DryRun) -> Iterator[str]:
    recipe = found.recipe
    if not found.is_device_here:
        yield "planned for a GPU, and torch finds no CUDA device here: this machine cannot run it"
    if found.memory is not None and found.device is not None and recipe.model.recompute != "auto":
        choice = choose_recompute(recipe, found.memory, found.device)
        if choice.warning is not None:
            yield choice.warning
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
