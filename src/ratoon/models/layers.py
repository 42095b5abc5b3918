"""A decoder's layers: what is compiled, computed again and gathered one at a time."""

import torch.nn as nn
from transformers.modeling_layers import GradientCheckpointingLayer


def marked_layers(model: nn.Module) -> list[nn.Module]:
    """In the order in which they run, as transformers marks them; empty where a model does not."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
