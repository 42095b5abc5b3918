"""Logits of the rows that are asked for, as scoring computes them: in float32, whatever the weights are in."""

# Shape letters: R rows, C channels, V vocabulary.

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.models.interface import attachment_of, head_of
from ratoon.models.invariant import invariant_logits


def float32_logits(model: PreTrainedModel, hidden_RC: Tensor) -> Tensor:
    """[R, V] of an attached model's last hidden states (float64 for float64 ones), after its own scale and cap.

    A head of 16 bits is multiplied out into float32 sums, which are not rounded to 16 bits on a GPU.
    """
    attachment = attachment_of(model)
    head = head_of(model)
    if hidden_RC.shape[0] == 0:
        dtype = torch.promote_types(hidden_RC.dtype, torch.float32)
        return hidden_RC.new_empty(0, head.weight.shape[0], dtype=dtype)
    if attachment.batch_invariant:
        logits_RV = invariant_logits(hidden_RC, head)
    elif hidden_RC.is_cuda and hidden_RC.dtype in (torch.bfloat16, torch.float16):
        logits_RV = torch.mm(hidden_RC, head.weight.t(), out_dtype=torch.float32)
        if head.bias is not None:
            logits_RV += head.bias
    else:
        logits_RV = head(hidden_RC)
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    if attachment.logit_scale != 1.0:
        logits_RV = logits_RV * attachment.logit_scale
    cap = attachment.logit_softcap
    return logits_RV if cap is None else torch.tanh(logits_RV / cap) * cap
