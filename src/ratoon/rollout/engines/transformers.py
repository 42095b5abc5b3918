"""The in-process engine over transformers' continuous batching."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.batch import GenerationBatch
from ratoon.rollout.engines.continuous_batching import check_hooks
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged_attention import PAGED_ATTENTION
from ratoon.rollout.engines.shared_weights import twin_of


class TransformersEngine(InProcessEngine[GenerationBatch]):
    """A `RolloutEngine` in this process that needs nothing but transformers; made for CPUs."""

    def __init__(self, config: RolloutConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        check_hooks()
        twin = twin_of(model, PAGED_ATTENTION)
        batch = GenerationBatch(twin, config.max_concurrent_responses, config.cache_tokens)
        super().__init__(config, model, tokenizer, twin, batch)
