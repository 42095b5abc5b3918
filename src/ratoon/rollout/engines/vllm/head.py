"""The float32 output head of vLLM before 0.26, which heeds `head_dtype` for pooling models alone.

The layer takes the place of vLLM's by `PluggableLayer.register_oot`, vLLM's way for layers from outside of it.
"""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

_NAME = "LogitsProcessor"


class HeadOfDtype(LogitsProcessor):
    """vLLM's, but logits of a 16-bit model are float32 where its configuration has `head_dtype = "float32"`.

    Letters: T tokens, D hidden size, V vocabulary.
    """

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        model_config = get_current_vllm_config().model_config
        self.is_float32: bool = getattr(model_config.hf_config, "head_dtype", None) == "float32"

    def _get_logits(
        self, hidden_states: Tensor, lm_head: VocabParallelEmbedding, embedding_bias: Tensor | None
    ) -> Tensor | None:
        """[T, V] of [T, D]. Raises ValueError for a quantized head."""
        if not self.is_float32 or hidden_states.dtype == torch.float32:
            return super()._get_logits(hidden_states, lm_head, embedding_bias)
        if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod):
            raise ValueError(
                f"logits in float32 want an output head that is not quantized, got one with "
                f'{type(lm_head.quant_method).__name__}; set rollout.vllm.head_dtype to "model"'
            )
        logits_TV = self._gather_logits(float32_logits(hidden_states, lm_head.weight, embedding_bias))
        return None if logits_TV is None else logits_TV[..., : self.org_vocab_size]


def float32_logits(hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """[T, V], float32. On a GPU from 16-bit factors, with no copy of the head; elsewhere both are cast."""
    if not hidden_TD.is_cuda:
        return linear(hidden_TD.float(), head_VD.float(), None if bias_V is None else bias_V.float())
    logits_TV = torch.mm(hidden_TD, head_VD.t(), out_dtype=torch.float32)
    return logits_TV if bias_V is None else logits_TV + bias_V.float()


def register_head() -> None:
    """For every engine of this process that is made from now on. Warns where another such layer is in the place."""
    found = op_registry_oot.get(_NAME)
    if found is None:
        PluggableLayer.register_oot(name=_NAME)(HeadOfDtype)
    elif found is not HeadOfDtype:
        warnings.warn(
            f"vLLM's {_NAME} is {found.__module__}.{found.__qualname__} here, of a plugin: logits have the dtype "
            "that it gives them, whatever rollout.vllm.head_dtype says",
            RuntimeWarning,
            stacklevel=2,
        )
