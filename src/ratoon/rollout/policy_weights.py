"""The policy's weights as engines with weights of their own take them."""

import torch
from transformers import PreTrainedModel

from ratoon.models.whole_weights import WholeWeights
from ratoon.weight_sync import CheckpointNames, WeightStream


def policy_stream(model: PreTrainedModel, dtype: torch.dtype) -> WeightStream:
    """Whole, adapters merged, under checkpoint names, in `dtype`; each made when it is read.

    Of a model that is cut over ranks, all of them read their streams together and to the end: each weight is gathered
    by itself, and no rank holds all. Raises UserError for weights that have no such form.
    """
    weights = WholeWeights.of(model, dtype)
    return WeightStream(CheckpointNames.of(model, weights.shapes), weights.value)
