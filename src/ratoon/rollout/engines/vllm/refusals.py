"""What vLLM in this process cannot do as a recipe has it."""

import torch.distributed as dist
from transformers import PreTrainedModel

from ratoon.rollout.config import RolloutConfig
from ratoon.types import SamplingParams, UserError

_LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this without a word to its caller."""


def check_settings(config: RolloutConfig, model: PreTrainedModel) -> None:
    """Raises UserError for what vLLM cannot do as the recipe has it, with this model."""
    check_recipe(config)
    if config.vllm.sleep and model.device.type != "cuda":
        raise UserError(
            f"rollout.vllm.sleep = {config.vllm.sleep} gives back a GPU's memory, and the model is on the "
            f"{model.device.type}; set it to 0"
        )


def check_recipe(config: RolloutConfig) -> None:
    """Raises UserError for what vLLM cannot do, whatever the model."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise UserError(
            'rollout.engine = "vllm" runs in the process of the trainer, and this run has '
            f'{dist.get_world_size()} of them; use rollout.engine = "vllm-server" or "transformers"'
        )
    if config.cache_tokens is not None:
        raise UserError(
            "rollout.cache_tokens is not vLLM's measure of its cache; remove it, and set rollout.vllm.cache_gib"
        )
    check_sampling(config.sampling_params(seed=0))


def check_sampling(sampling: SamplingParams) -> None:
    """Raises UserError for draws that could not be trained on exactly."""
    if sampling.is_truncated and sampling.temperature > 0:
        raise UserError(
            'rollout.engine = "vllm" does not record which tokens top_p, top_k and min_p leave, and training needs '
            'them; set top_p = 1, top_k = 0 and min_p = 0, or use rollout.engine = "transformers"'
        )
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise UserError(
            f"vLLM does not draw at temperatures below {_LEAST_TEMPERATURE} (got {sampling.temperature:g}); raise "
            "rollout.temperature, or set it to 0 in an evaluation"
        )
