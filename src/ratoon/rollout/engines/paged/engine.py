"""The in-process engine over a paged cache of our own: by our kernels on a GPU, in torch's operations elsewhere."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.models.interface import is_batch_invariant
from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.drawing import TokenScore
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.experts import why_not_recorded
from ratoon.rollout.engines.paged.runner import Runner
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of


class PagedEngine(InProcessEngine[PagedBatch]):
    """A `RolloutEngine` in this process that batches single responses. On a GPU the model is attached."""

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
        reason = why_not_recorded(twin) if twin.device.type == "cuda" else None
        self.notes: tuple[str, ...] = () if reason is None else (f"decoding without CUDA graphs: {reason}",)
        batch = PagedBatch(
            _runner_of(twin, config),
            config.max_concurrent_responses,
            config.cache_tokens,
            restarts=restarts,
            score=_score_of(twin),
        )
        super().__init__(config, model, tokenizer, twin, batch)


def _score_of(twin: PreTrainedModel) -> TokenScore | None:
    if not is_batch_invariant(twin):
        return None
    from ratoon.ops.invariant.entry import score_tokens  # brings Triton

    return score_tokens


def _runner_of(twin: PreTrainedModel, config: RolloutConfig) -> Runner:
    if twin.device.type != "cuda" and not is_batch_invariant(twin):
        return TorchRunner(twin, returns_routes=config.return_routed_experts)
    from ratoon.rollout.engines.paged.kernel_runner import KernelRunner  # brings Triton

    return KernelRunner(twin, config.max_concurrent_responses, returns_routes=config.return_routed_experts)
