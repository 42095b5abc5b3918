"""Which engine a recipe gets."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engine import RolloutEngine
from ratoon.rollout.errors import TESTED_TRANSFORMERS, RolloutError


def build_engine(
    config: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str | None = None,
) -> RolloutEngine:
    """The engine `config.engine` names.

    model: the trainer's, attached or not, on the device it trains on. The `transformers` engine shares its parameters:
    build it after the last change to the model's modules, and it follows the optimizer from then on.
    device: checked against the model's where it is given.
    """
    if config.engine == "transformers":
        from ratoon.rollout.engines.shared_weights import check_device

        check_device(device, model)
        try:
            from ratoon.rollout.engines.transformers import TransformersEngine
        except ImportError as error:
            raise RolloutError(
                f"transformers' continuous batching is not where it was in {TESTED_TRANSFORMERS}, the tested range: "
                f"{error}; install a transformers of that range"
            ) from error
        return TransformersEngine(config, model, tokenizer)
    raise ValueError(f"rollout.engine must be 'transformers', got {config.engine!r}")
