"""The in-process engine over a paged cache of our own."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of


class PagedEngine(InProcessEngine[PagedBatch]):
    """A `RolloutEngine` in this process that batches single responses."""

    def __init__(
        self,
        config: RolloutConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        restarts: bool = False,
    ) -> None:
        """restarts: new weights compute the keys of responses in flight again, rather than go on from old ones."""
        twin = twin_of(model, BLOCK_ATTENTION)
        batch = PagedBatch(TorchRunner(twin), config.max_concurrent_responses, config.cache_tokens, restarts=restarts)
        super().__init__(config, model, tokenizer, twin, batch)
