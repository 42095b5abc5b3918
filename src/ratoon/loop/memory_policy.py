"""What the backward pass computes again: chosen once per run, so that the worst step fits the device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ratoon.config.recipe import Recipe
from ratoon.loop.device_memory import DeviceMemory
from ratoon.loop.run_memory import RunMemory
from ratoon.planner.memory import MemoryEstimate
from ratoon.planner.memory_sizes import GIB, RecomputeMode
from ratoon.trainer.eight_bit_optimizer import check_bitsandbytes
from ratoon.types.errors import UserError

FASTEST_FIRST: tuple[RecomputeMode, ...] = ("none", "selective", "full")

_ROW_STEP = 256
"""Rows that the message of a run which does not fit counts in."""

_ADAPTER_SHARE = 0.01
"""Of the weights, that adapters are assumed to have, where the message says whether they would fit."""

_ADAPTER_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """What a run computes again, and why."""

    recompute: RecomputeMode
    is_automatic: bool

    memory: RunMemory | None
    """None where the number of weights is not known: nothing is predicted."""

    device: DeviceMemory

    @property
    def predicted(self) -> MemoryEstimate | None:
        return None if self.memory is None else self.memory.at_worst(self.recompute)

    @property
    def sentence(self) -> str:
        """For the log: the choice, what it is predicted to take, and what faster modes would."""
        chosen_by = "" if self.is_automatic else " (as the recipe says)"
        if self.memory is None or self.predicted is None:
            return f"memory: recompute {self.recompute}{chosen_by}; the model's size is not known, nothing is predicted"
        rejected = FASTEST_FIRST[: FASTEST_FIRST.index(self.recompute)] if self.is_automatic else ()
        over = "".join(f"; {mode} would take {_gib(self.memory.at_worst(mode).peak_bytes)}" for mode in rejected)
        return (
            f"memory: recompute {self.recompute}{chosen_by}: predicted peak {_gib(self.predicted.peak_bytes)} of "
            f"{_gib(self.device.total_bytes)} GiB ({self.predicted.peak_phase}), of which "
            f"{_gib(self.device.usable_bytes)} may be filled ({self.device.margin}){over}"
        )

    @property
    def warning(self) -> str | None:
        """Where the recipe insists on what is predicted not to fit."""
        if self.predicted is None or self.predicted.peak_bytes <= self.device.usable_bytes:
            return None
        return (
            f"memory: {_gib(self.predicted.peak_bytes)} GiB are predicted with model.recompute = "
            f'"{self.recompute}", and {_gib(self.device.usable_bytes)} GiB may be filled; '
            'where memory runs out, set model.recompute = "auto"'
        )

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with this choice instead of "auto"."""
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"recompute": self.recompute})})


def choose_recompute(recipe: Recipe, memory: RunMemory | None, device: DeviceMemory) -> MemoryChoice:
    """What the recipe says; for "auto" the fastest mode whose worst step fits.

    Raises UserError for "auto" where none fits, with values that would, or where nothing can be predicted; and for an
    optimizer that cannot be offloaded, or whose library is missing.
    """
    if recipe.trainer.optimizer_states == "8bit":
        check_bitsandbytes()
    if recipe.trainer.offload_optimizer and device.device_type == "cpu":
        raise UserError(
            "trainer.offload_optimizer moves moments and float32 weights from a GPU to host memory, and this run "
            "trains on the CPU; remove it"
        )
    named = recipe.model.recompute
    if named != "auto":
        return MemoryChoice(recompute=named, is_automatic=False, memory=memory, device=device)
    if memory is None:
        raise UserError(
            'model.recompute = "auto" goes by the number of weights, which only the model folder\'s own code knows; '
            'set it to "none", "selective" or "full" (the slowest, and the least memory)'
        )
    found = fitting_mode(memory, device)
    if found is None:
        raise UserError(does_not_fit(recipe, memory, device))
    return MemoryChoice(recompute=found, is_automatic=True, memory=memory, device=device)


def fitting_mode(memory: RunMemory, device: DeviceMemory) -> RecomputeMode | None:
    """The fastest whose worst step fits; None where not even the last does."""
    for mode in FASTEST_FIRST:
        if memory.at_worst(mode).peak_bytes <= device.usable_bytes:
            return mode
    return None


def does_not_fit(recipe: Recipe, memory: RunMemory, device: DeviceMemory) -> str:
    """What is predicted, what there is, and what would fit."""
    least = memory.at_worst("full")
    ways = list(_ways_out(recipe, memory, device))
    return (
        f"one step needs {_gib(least.peak_bytes)} GiB (in {least.peak_phase}) even with everything computed again, and "
        f"{_gib(device.usable_bytes)} GiB of this {_name(device)}'s {_gib(device.total_bytes)} may be filled "
        f"({device.margin}). "
        + (f"What would fit: {'; or '.join(ways)}" if ways else "No single setting makes it fit: take a smaller model")
        + '. model.recompute = "full" tries all the same'
    )


def _ways_out(recipe: Recipe, memory: RunMemory, device: DeviceMemory) -> Iterator[str]:
    """Single changes of the recipe with which the worst step fits."""

    def fits(changed: RunMemory) -> bool:
        return fitting_mode(changed, device) is not None

    rows = most_rows(memory, device)
    if rows is not None:
        yield f"planner.max_rows_per_microbatch = {rows}"
    weights = memory.weights
    if recipe.model.dtype == "float32" and fits(memory.with_weights(replace(weights, dtype_bytes=2))):
        yield 'model.dtype = "bfloat16"'
    if (
        memory.on_cuda
        and memory.shards.num_shards == 1
        and fits(
            memory.with_weights(
                replace(weights, is_optimizer_on_host=True, has_eight_bit_moments=False),
                adapter_rank=memory.worst.adapter_rank,
            )
        )
    ):
        yield "trainer.offload_optimizer = true (slower)"
    if (
        memory.shards.num_shards == 1
        and not weights.is_optimizer_on_host
        and fits(
            memory.with_weights(replace(weights, has_eight_bit_moments=True), adapter_rank=memory.worst.adapter_rank)
        )
    ):
        yield 'trainer.optimizer_states = "8bit" (rounded moments)'
    if recipe.model.lora is None:
        trained = int(_ADAPTER_SHARE * weights.num_parameters)
        adapted = replace(
            weights,
            num_parameters=weights.num_parameters + trained,
            num_trainable_parameters=trained,
            num_reference_parameters=0,
        )
        if fits(memory.with_weights(adapted, adapter_rank=_ADAPTER_RANK)):
            yield f"adapters, [model.lora] with rank = {_ADAPTER_RANK}"
    fewer = memory.generation.cache_tokens // 2
    while fewer >= memory.longest_sequence + _ROW_STEP:
        if fits(memory.with_cache(fewer)):
            yield f"rollout.cache_tokens = {fewer}"
            break
        fewer //= 2


def most_rows(memory: RunMemory, device: DeviceMemory) -> int | None:
    """The largest row limit with which the worst step fits, everything computed again. None where none does."""

    def fits(rows: int) -> bool:
        return memory.at_worst("full", max_rows=rows).peak_bytes <= device.usable_bytes

    least = memory.longest_sequence
    if least >= memory.worst.num_rows or not fits(least):
        return None
    fitting, too_many = least, memory.worst.num_rows
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return max(fitting // _ROW_STEP * _ROW_STEP, least)


def _name(device: DeviceMemory) -> str:
    if device.device_type == "cuda":
        return "GPU"
    return "machine" if device.num_sharers == 1 else "process"


def _gib(num_bytes: int) -> str:
    """Small models take little: two digits at least."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"
