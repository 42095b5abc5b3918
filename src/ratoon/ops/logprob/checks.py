"""What the log-prob operations refuse."""

# Shape letters: M scored tokens, C channels, V vocabulary.

import math

import torch
from torch import Tensor

from ratoon.ops.logprob.transform import LogitTransform

MIN_TEMPERATURE = 1e-6
"""Far below it, logits over the temperature leave fp32."""

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(
    operation: str, hidden_MC: Tensor, weight_VC: Tensor, target_M: Tensor, bias_V: Tensor | None
) -> None:
    """Raise ValueError, in the operation's name, for what `linear_logprob` says it does not take."""
    if hidden_MC.ndim != 2 or hidden_MC.dtype not in _FLOATING:
        raise ValueError(
            f"{operation}: hidden must be [M, C] in fp64, fp32, bf16 or fp16, "
            f"got {_describe(hidden_MC)}; flatten batch dimensions first"
        )
    M, C = hidden_MC.shape
    if weight_VC.ndim != 2 or weight_VC.shape[1] != C or weight_VC.shape[0] == 0:
        raise ValueError(
            f"{operation}: weight must be [V, C] with V >= 1 and hidden's C={C}, got {_describe(weight_VC)}"
        )
    V = weight_VC.shape[0]
    if target_M.shape != (M,) or target_M.dtype not in _INTEGER:
        raise ValueError(f"{operation}: target must be [M={M}] integers, one a row, got {_describe(target_M)}")
    if bias_V is not None and bias_V.shape != (V,):
        raise ValueError(f"{operation}: bias must be [V={V}], one a weight row, got {_describe(bias_V)}")
    for name, tensor in (("weight", weight_VC), ("bias", bias_V)):
        if tensor is not None and tensor.dtype != hidden_MC.dtype:
            raise ValueError(
                f"{operation}: {name} must have hidden's dtype {hidden_MC.dtype}, got {tensor.dtype}; cast one"
            )
    for name, tensor in (("weight", weight_VC), ("target", target_M), ("bias", bias_V)):
        if tensor is not None and tensor.device != hidden_MC.device:
            raise ValueError(
                f"{operation}: {name} must be on hidden's device {hidden_MC.device}, got {tensor.device}; move it"
            )
    if M and target_M.device.type == "cpu":
        lowest, highest = int(target_M.min()), int(target_M.max())
        if lowest < 0 or highest >= V:
            raise ValueError(
                f"{operation}: targets must be in [0, V={V}), got values from {lowest} to {highest}; "
                "leave out the rows that are not to be scored"
            )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def checked_transform(
    operation: str, temperature: float, logit_scale: float, logit_softcap: float | None
) -> LogitTransform:
    """The transform of finite numbers; raises ValueError for any other."""
    if not MIN_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"{operation}: temperature must be finite and at least {MIN_TEMPERATURE}, got {temperature}; "
            "greedy decoding has no log-probs, score it at the temperature you mean to train at"
        )
    if not math.isfinite(logit_scale):
        raise ValueError(f"{operation}: logit_scale must be finite, got {logit_scale}")
    if logit_softcap is not None and not (math.isfinite(logit_softcap) and logit_softcap > 0):
        raise ValueError(
            f"{operation}: logit_softcap must be finite and above 0, got {logit_softcap}; None leaves it out"
        )
    return LogitTransform(temperature=temperature, logit_scale=logit_scale, softcap=logit_softcap)
