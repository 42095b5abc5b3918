"""Operations between the model and the loss that need more than one line of torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.ops.logprob.entry import linear_logprob
    from ratoon.ops.logprob.support import support_logprob

_HOMES = {"linear_logprob": "logprob.entry", "support_logprob": "logprob.support"}

__all__ = ["linear_logprob", "support_logprob"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
