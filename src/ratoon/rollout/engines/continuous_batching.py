"""The points at which generation takes over from transformers' continuous batching.

Its scheduler, paged cache, block sharing and input preparation are used as they are. Replaced, by subclass, are: how a
request takes a token and forks (`SampledRequest`), how tokens are drawn (`SeededModelRunner`), when two blocks may be
the same (`_GroupBlocks`), and the reseeding of torch's global generator (`_NoSeeding`). The processor is stepped by its
caller; its manager and background thread are not used.
"""

# Shape letters: B responses of one forward pass.

import inspect
import itertools
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import cache_manager as cb_cache_manager
from transformers.generation.continuous_batching import continuous_api as cb_api
from transformers.generation.continuous_batching import distributed as cb_distributed
from transformers.generation.continuous_batching import input_outputs as cb_inputs
from transformers.generation.continuous_batching import model_runner as cb_runner
from transformers.generation.continuous_batching import requests as cb_requests
from transformers.generation.continuous_batching import scheduler as cb_scheduler
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.initialization import resolve_continuous_batching_config
from transformers.generation.logits_process import LogitsProcessorList

from ratoon.rollout.drafts import ResponseDraft
from ratoon.rollout.engines.cache_budget import BLOCK_TOKENS
from ratoon.rollout.engines.drawing import draw_tokens
from ratoon.rollout.engines.reads import BatchReads, LayerReads, Request
from ratoon.rollout.errors import TESTED_TRANSFORMERS, RolloutError

PREFILL_TOKENS = 2_048
"""Most tokens of one forward pass; longer prompts are read in pieces."""


class SampledRequest(cb_requests.RequestState):
    """One response in the batch, or a prompt that will fork into its group's responses.

    `rows` are the responses this request stands for until it forks: itself first, then its children.
    """

    rows: tuple[ResponseDraft, ...] = ()
    family: str = ""
    """Id of the request it was forked from, or its own: requests of one family share their prompt's blocks."""

    @classmethod
    def of(cls, request_id: str, prompt_tokens: list[int], rows: tuple[ResponseDraft, ...]) -> "SampledRequest":
        request = cls(
            request_id=request_id, initial_tokens=prompt_tokens, max_new_tokens=None, num_children=len(rows) - 1
        )
        request.rows = rows
        request.family = request_id
        return request

    @property
    def num_shared_tokens(self) -> int:
        """Prompt tokens whose blocks the family shares: whole blocks before the last token."""
        return (len(self.initial_tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def draft(self) -> ResponseDraft:
        return self.rows[0]

    def child_ids(self) -> list[str]:
        """The names its children will have after the fork."""
        return [f"{self.request_id}__child#{index}" for index in range(self.num_children)]

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        assert logprob is not None, "the batch was set up without log-probs"
        self.generated_tokens.append(token_id)
        self.tokens_to_process = [token_id]
        if self.draft.take(token_id, logprob):
            self.status = cb_requests.RequestStatus.FINISHED
            return True
        return False

    def fork(self, new_request_id: str) -> "SampledRequest":
        index = int(new_request_id.rpartition("#")[2]) + 1
        child = SampledRequest.of(new_request_id, self.initial_tokens, (self.rows[index],))
        child.family = self.family
        child.remaining_prefill_tokens = self.remaining_prefill_tokens[:]
        child.tokens_to_process = self.tokens_to_process[:]
        child.position_offset = self.position_offset
        child.allocated_blocks = self.allocated_blocks
        child.status = self.status
        return child

    def create_equivalent_initial_request(self) -> "SampledRequest":
        # Only a full cache starts a request over, and whatever is admitted was promised its blocks.
        raise RolloutError(f"the cache ran out of blocks under admitted request {self.request_id}")


class SeededModelRunner(cb_runner.ModelRunner):
    """Draws each response's token from its own stream, and tells attention which keys each request reads."""

    def compute_batch(self, model: nn.Module, batch_data: dict) -> None:  # pyright: ignore[reportMissingTypeArgument]
        batch_data["batch_reads"] = self._reads()
        super().compute_batch(model, batch_data)

    @property
    def _inputs(self) -> cb_inputs.ContinuousBatchingIOs:
        inputs = self.inputs_and_outputs
        assert isinstance(inputs, cb_inputs.ContinuousBatchingIOs), "the processor was set up to batch synchronously"
        return inputs

    def _scheduled(self) -> Iterator[tuple[SampledRequest, cb_requests.FutureRequestState]]:
        """The requests of this forward pass, in the order of their rows."""
        for scheduled in self._inputs.requests_in_batch:
            request = scheduled.state
            assert isinstance(request, SampledRequest), f"{request.request_id} was not submitted by the engine"
            yield request, scheduled

    def _reads(self) -> BatchReads:
        device = self._inputs.input_ids.device
        in_window: LayerReads | None = None
        by_group: list[LayerReads] = []
        for allocator in self.cache.group_cache_managers:
            if isinstance(allocator, cb_cache_manager.FullAttentionCacheAllocator):
                by_group.append(LayerReads.plan(self._full_requests(allocator), device))
            else:
                in_window = in_window or LayerReads.plan(self._sliding_requests(), device)
                by_group.append(in_window)
        return BatchReads(tuple(by_group))

    def _full_requests(self, allocator: cb_cache_manager.FullAttentionCacheAllocator) -> Iterator[Request]:
        for request, scheduled in self._scheduled():
            # The position has moved past this batch's queries already.
            num_keys = request.position_offset
            blocks = np.array(allocator.block_table[request.request_id], np.int64)
            slots = (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()[:num_keys]
            num_shared = min(request.num_shared_tokens, num_keys - 1)
            yield Request(scheduled.query_length, slots, request.family, num_shared)

    def _sliding_requests(self) -> Iterator[Request]:
        start = 0
        for request, scheduled in self._scheduled():
            num_queries = scheduled.query_length
            num_past = request.position_offset - num_queries
            end = start + self.cache.get_seqlens_k(num_past, num_queries)["sliding_attention"]
            yield Request(num_queries, np.arange(start, end))
            start = end

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        drafts = [request.draft for request, scheduled in self._scheduled() if scheduled.has_new_token]
        if not drafts:
            return
        token_B, logprob_B = draw_tokens(drafts, scores[0, : len(drafts)])
        output_ids[0, : len(drafts)].copy_(token_B)
        # The float32 bits travel in the int32 row, as continuous batching expects.
        output_ids[1, : len(drafts)].copy_(logprob_B.view(torch.int32))


class _GroupBlocks(cb_cache_manager.BlockManager):
    """Shares blocks inside a group, never across groups.

    Stock block hashes outlive their requests, and with them the keys and values of weights that have since changed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, tp_on=False)
        self._never_twice = itertools.count()

    def compute_hash(self, parent_hash: int | None, tokens: list[int], group_id: int) -> int:
        return next(self._never_twice)


class _NoSeeding(cb_distributed.DistributedHelper):
    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        """Draws are seeded per response; torch's global generator stays as it is."""


class _NoDelivery(cb_api.OutputRouter):
    def deliver_batch(self, outputs: list[cb_requests.GenerationOutput]) -> None:
        """Responses report themselves token by token."""


def build_processor(
    model: PreTrainedModel, num_blocks: int, max_requests: int, longest_request: int
) -> cb_api.ContinuousBatchProcessor:
    """A processor that is stepped by hand, over a cache of `num_blocks` blocks of `BLOCK_TOKENS` tokens.

    model: in eval mode, with `paged_attention` as its attention.
    longest_request: prompt and response tokens of the longest request to come.
    """
    config = model.config.get_text_config()
    no_processing = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    wanted = ContinuousBatchingConfig(
        block_size=BLOCK_TOKENS,
        num_blocks=num_blocks,
        max_batch_tokens=max(PREFILL_TOKENS, max_requests),
        max_requests_per_batch=max_requests,
        max_blocks_per_request=0,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False,
        safety_margin=0.0,
        return_logprobs=True,
    )
    settings = resolve_continuous_batching_config(config, wanted, workload_hints=None, has_logit_processors=False)
    helper = _NoSeeding(device_mesh=None, cpu_group_timeout=None)
    cache = cb_cache.PagedAttentionCache(config, settings, model.device, helper, tp_plan={}, dtype=model.dtype)
    cache._block_manager = _GroupBlocks(cache.num_blocks, cache.block_size)
    cache.use_prefix_sharing = False
    # From here on these two only bound the keys that one batch reads, and a shared key is read by each response.
    cache.num_blocks = max(cache.num_blocks, max_requests * (longest_request // BLOCK_TOKENS + 1))
    cache.num_pages = cache.num_blocks * BLOCK_TOKENS
    processor = cb_api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=GenerationConfig(do_sample=True),
        continuous_batching_config=settings,
        logit_processor=no_processing,
        input_queue=None,
        cancel_queue=None,
        output_router=_NoDelivery(),
        background_thread_status=cb_api.BackgroundThreadStatus(),
        model_device=model.device,
        model_dtype=model.dtype,
        scheduler=cb_scheduler.FIFOScheduler(cache, safety_margin=0.0, max_requests_per_batch=max_requests),
        distributed_helper=helper,
    )
    inputs = processor.inputs_and_outputs
    # On a stream of its own the forward pass would not wait for the optimizer's writes to the shared weights.
    inputs.compute_stream = None  # pyright: ignore[reportAttributeAccessIssue]
    processor.model_runner = SeededModelRunner(
        logit_processor=no_processing,
        cb_config=settings,
        inputs_and_outputs=inputs,
        cache=cache,
        do_sample=True,
        return_logprobs=True,
    )
    return processor


def check_hooks() -> None:
    """Raise RolloutError where the installed transformers lacks what this module replaces."""
    expected: list[tuple[object, str, tuple[str, ...]]] = [
        (cb_runner.ModelRunner, "_sample", ("self", "scores", "output_ids")),
        (cb_runner.ModelRunner, "compute_batch", ("self", "model", "batch_data")),
        (cb_requests.RequestState, "update_and_check_completion", ("self", "token_id", "logprob")),
        (cb_requests.RequestState, "fork", ("self", "new_request_id")),
        (cb_cache_manager.BlockManager, "compute_hash", ("self", "parent_hash", "tokens", "group_id")),
        (cb_distributed.DistributedHelper, "set_tp_seed", ("self", "seed", "model_device")),
        (cb_api.ContinuousBatchProcessor, "prepare_next_batch", ("self",)),
        (cb_api.ContinuousBatchProcessor, "_generation_step", ("self", "model")),
        (cb_api.ContinuousBatchProcessor, "update_batch", ("self",)),
    ]
    for owner, name, parameters in expected:
        assert isinstance(owner, type), f"{owner} must be a class"
        hook = inspect.getattr_static(owner, name, None)
        if hook is None or tuple(inspect.signature(hook).parameters) != parameters:
            found = "is missing" if hook is None else f"takes {tuple(inspect.signature(hook).parameters)}"
            raise RolloutError(
                f"{owner.__name__}.{name} of transformers' continuous batching {found} in transformers "
                f"{transformers.__version__}, but seeded rollouts replace it and need {parameters}; "
                f"install a transformers of {TESTED_TRANSFORMERS}, the tested range"
            )
