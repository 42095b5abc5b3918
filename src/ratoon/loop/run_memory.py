"""What of a recipe decides how much memory its steps take, and the estimate made from it."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from ratoon.config.recipe import Recipe
from ratoon.data import DataReport
from ratoon.loop.device_memory import DeviceMemory
from ratoon.models import ModelPreview
from ratoon.models.load import DTYPES
from ratoon.models.outline import ModelOutline
from ratoon.planner.memory import MemoryEstimate, estimate_memory
from ratoon.planner.memory_sizes import GenerationSize, MicrobatchSize, RecomputeMode, Shards, WeightsInMemory
from ratoon.rollout.config import EngineName
from ratoon.rollout.engines.cache_budget import CacheLayout
from ratoon.rollout.engines.paged.sizes import BLOCK_TOKENS as PAGED_BLOCK_TOKENS
from ratoon.rollout.engines.paged.sizes import STEPS_TOGETHER
from ratoon.trainer import Update
from ratoon.types.model_shape import ModelShape

RowCounts = tuple[int, int, int]
"""Of a microbatch: rows, scored tokens, and those of its rows that are a kept prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """One rank's steps."""

    shape: ModelShape
    weights: WeightsInMemory
    generation: GenerationSize
    worst: MicrobatchSize
    """The largest microbatch that the recipe allows and its data can fill. Its `recompute` is replaced."""

    longest_sequence: int
    """Tokens of the longest prompt and response: no microbatch has room for fewer rows."""

    on_cuda: bool
    shards: Shards
    num_sharers: int = 1
    """Ranks that hold each microbatch together; rows here are the whole microbatch's."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        model: ModelPreview,
        outline: ModelOutline,
        data: DataReport,
        *,
        on_cuda: bool,
        num_ranks: int = 1,
    ) -> "RunMemory | None":
        """None where the number of weights is not known without the folder's own code.

        num_ranks: that the model is cut over.
        """
        if model.num_parameters is None or model.num_trained is None:
            return None
        lora, num_sharers = recipe.model.lora, recipe.trainer.sequence_parallel
        has_second_model = recipe.algorithm.needs_reference and lora is None
        return cls(
            shape=model.shape,
            weights=WeightsInMemory(
                num_parameters=model.num_parameters + (0 if lora is None else model.num_trained),
                num_trainable_parameters=model.num_trained,
                dtype_bytes=DTYPES[recipe.model.dtype].itemsize,
                num_reference_parameters=model.num_parameters if has_second_model else 0,
                num_four_bit_parameters=model.num_quantised,
                is_optimizer_on_host=recipe.trainer.offload_optimizer,
                has_eight_bit_moments=recipe.trainer.optimizer_states == "8bit",
            ),
            generation=_generation(recipe, model.shape, data, on_cuda=on_cuda),
            worst=replace(
                _worst_microbatch(recipe, data, keeps_prompts=num_ranks == 1 and num_sharers == 1),
                has_qk_norm=outline.has_qk_norm,
                is_compiled=recipe.model.compile_on("cuda" if on_cuda else "cpu", num_experts=model.shape.num_experts)
                == "layers",
                adapter_rank=0 if lora is None else lora.rank,
            ),
            longest_sequence=data.lengths.maximum + recipe.rollout.max_response_tokens,
            on_cuda=on_cuda,
            shards=Shards(num_shards=num_ranks),
            num_sharers=num_sharers,
        )

    def at_worst(self, recompute: RecomputeMode, *, max_rows: int | None = None) -> MemoryEstimate:
        """Of a step whose largest microbatch is the worst one, or has `max_rows` at most."""
        worst = self.worst
        if max_rows is not None and max_rows < worst.num_rows:
            worst = replace(
                worst, num_rows=max_rows, num_scored=min(worst.num_scored, max_rows), is_only_one=False
            )  # fmt: skip
        return self._estimate(replace(worst, recompute=recompute))

    def of_updates(self, updates: Iterable[Iterable[RowCounts]], recompute: RecomputeMode) -> MemoryEstimate | None:
        """Of the step whose updates have these microbatches on this rank: where the most is taken. None without any."""
        found = [
            self._estimate(
                replace(
                    self.worst,
                    num_rows=num_rows,
                    num_scored=num_scored,
                    num_kept_rows=num_kept_rows,
                    recompute=recompute,
                    is_only_one=len(microbatches) == 1,
                )
            )
            for microbatches in map(list, updates)
            for num_rows, num_scored, num_kept_rows in set(microbatches)
            if num_scored
        ]
        return max(found, key=lambda estimate: estimate.update_bytes, default=None)

    def with_weights(self, weights: WeightsInMemory, *, adapter_rank: int = 0) -> "RunMemory":
        """The same steps of other weights."""
        return replace(self, weights=weights, worst=replace(self.worst, adapter_rank=adapter_rank))

    def with_cache(self, cache_tokens: int) -> "RunMemory":
        return replace(self, generation=replace(self.generation, cache_tokens=cache_tokens))

    def _estimate(self, microbatch: MicrobatchSize) -> MemoryEstimate:
        own = microbatch.share(self.num_sharers)
        return estimate_memory(self.shape, self.weights, own, self.generation, on_cuda=self.on_cuda, shards=self.shards)


def row_counts(update: Update, rank: int) -> list[RowCounts]:
    """Of each of a data rank's microbatches."""
    kept = {number for start, stop in update.plan.kept_runs[rank] for number in range(start, stop)}
    counts: list[RowCounts] = []
    for number, parts in enumerate(update.plan.assignment[rank]):
        num_prompt_rows = sum(update.groups[index].prompt.num_tokens for index, _ in parts)
        num_scored = sum(update.groups[index].response_lengths[i] for index, chosen in parts for i in chosen)
        counts.append((num_prompt_rows + num_scored, num_scored, num_prompt_rows if number in kept else 0))
    return counts


def _worst_microbatch(recipe: Recipe, data: DataReport, *, keeps_prompts: bool) -> MicrobatchSize:
    """Rows and scored tokens; a warm start's demonstrations count as long as responses may be."""
    P, R, N = data.lengths.maximum, recipe.rollout.max_response_tokens, recipe.rollout.group_size
    groups_per_update = ceil(recipe.rollout.prompts_per_step / recipe.algorithm.num_minibatches)
    copies = 1 if recipe.planner.share_prompts else N
    rows, scored = groups_per_update * (copies * P + N * R), groups_per_update * N * R
    if recipe.sft is not None:
        rows = max(rows, recipe.sft.prompts_per_step * (P + R))
        scored = max(scored, recipe.sft.prompts_per_step * R)
    limit = recipe.planner.max_rows_per_microbatch
    is_kept = keeps_prompts and recipe.planner.share_prompts and limit < P + N * R
    return MicrobatchSize(
        num_rows=min(limit, rows),
        num_scored=min(limit, rows, scored),
        is_only_one=rows <= limit,
        num_kept_rows=min(P, limit) if is_kept else 0,
    )


def _most_open_responses(recipe: Recipe, data: DataReport) -> int:
    return max(recipe.rollout.responses_per_step, data.num_heldout * recipe.evaluation.group_size)


def engine_of(recipe: Recipe, device_type: str) -> EngineName:
    """The rollout engine that the recipe gets on such devices."""
    return recipe.rollout.engine_on(
        device_type,
        is_quantised=recipe.model.quantization is not None,
        is_batch_invariant=recipe.model.batch_invariant,
    )


def _generation(recipe: Recipe, shape: ModelShape, data: DataReport, *, on_cuda: bool) -> GenerationSize:
    """Nothing for engines with a model of their own: a server's memory is its own, and `left_by_engine` has vLLM's."""
    engine = engine_of(recipe, "cuda" if on_cuda else "cpu")
    if engine not in ("transformers", "paged"):
        return GenerationSize()
    is_paged = engine == "paged"
    return GenerationSize(
        cache_tokens=_paged_cache_tokens(recipe, data) if is_paged else _cache_tokens(recipe, shape, data),
        num_concurrent=min(recipe.rollout.max_concurrent_responses, _most_open_responses(recipe, data)),
    )


def left_by_engine(device: DeviceMemory, recipe: Recipe) -> DeviceMemory:
    """What a rollout engine that takes a share of the GPU for itself, and keeps it, leaves of the device."""
    vllm = recipe.rollout.vllm
    if recipe.rollout.engine != "vllm" or vllm.sleep or device.device_type != "cuda":
        return device
    taken = int(vllm.gpu_memory_utilization * device.total_bytes)
    return replace(device, usable_bytes=max(device.usable_bytes - taken, 0))


def _paged_cache_tokens(recipe: Recipe, data: DataReport) -> int:
    """As the engine of single responses makes its cache, with all layers alike."""
    rollout = recipe.rollout
    if rollout.cache_tokens is not None:
        return rollout.cache_tokens // PAGED_BLOCK_TOKENS * PAGED_BLOCK_TOKENS
    num_open = min(rollout.max_concurrent_responses, _most_open_responses(recipe, data))
    num_together = min(rollout.group_size, rollout.max_concurrent_responses)
    prompt_blocks = ceil(data.lengths.maximum / PAGED_BLOCK_TOKENS)
    own_blocks = ceil((rollout.max_response_tokens + STEPS_TOGETHER) / PAGED_BLOCK_TOKENS)
    num_blocks = ceil(num_open * (own_blocks + prompt_blocks / num_together)) + prompt_blocks
    return num_blocks * PAGED_BLOCK_TOKENS


def _cache_tokens(recipe: Recipe, shape: ModelShape, data: DataReport) -> int:
    """Tokens of continuous batching's cache, averaged over layers, once its longest prompts have come."""
    rollout = recipe.rollout
    layout = CacheLayout.of_shape(shape)
    if rollout.cache_tokens is not None:
        num_blocks = layout.tokens_to_blocks(rollout.cache_tokens)
    else:
        together = min(rollout.group_size, rollout.max_concurrent_responses)
        of_group = layout.blocks(data.lengths.maximum, rollout.max_response_tokens, together)
        num_open = min(rollout.max_concurrent_responses, _most_open_responses(recipe, data))
        num_blocks = ceil(of_group / together * num_open)
    return layout.blocks_to_tokens(num_blocks)
