"""Which of the optimizers a recipe asks for."""

from ratoon.trainer.config import TrainerConfig
from ratoon.trainer.eight_bit_optimizer import EightBitOptimizer
from ratoon.trainer.offloaded_optimizer import OffloadedOptimizer
from ratoon.trainer.optimizer import MasterOptimizer


def optimizer_kind(config: TrainerConfig) -> type[MasterOptimizer]:
    """All are made with the same arguments."""
    if config.offload_optimizer:
        return OffloadedOptimizer
    return EightBitOptimizer if config.optimizer_states == "8bit" else MasterOptimizer
