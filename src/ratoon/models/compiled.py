"""Layers that torch.compile has fused, around an attention that it does not look into."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from transformers import PreTrainedModel

from ratoon.models.config import Compile
from ratoon.models.interface import attachment_of, is_batch_invariant
from ratoon.models.layers import marked_layers
from ratoon.types import UserError

_MOST_GRAPHS = 64
"""Of one function. Kinds of layers, windows, gradients on or off and the passes of kept prompts multiply to more than
the compiler's own limit of 8, behind which it gives up and runs the function as it is."""

_OF_ANY_SIZE = {"triton.mix_order_reduction_non_strict_mode": True}
"""On GPUs the compiler fuses sums over rows with sums over features from some number of rows on, and guards that
number: packs on the two sides of it compiled a graph each. With this it fuses them at every number."""


def can_compile(model: PreTrainedModel) -> bool:
    """Whether the model marks its layers, which are what is compiled."""
    return bool(marked_layers(model))


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether its layers are: `set_compile` "layers"."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def layers_as_written(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers run as transformers wrote them: one pass without gradients is not worth graphs of its own."""
    compiled = [(module, call) for module in model.modules() if (call := module._compiled_call_impl) is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def set_compile(model: PreTrainedModel, mode: Compile, *, backend: str = "inductor") -> PreTrainedModel:
    """Sets, in place, whether the layers of an attached model run compiled where they read a forest.

    - `none`: as transformers wrote them.
    - `layers`: each decoder layer through torch.compile. Layers of one kind share their graphs. The number of rows is
      a symbol in them, so that neither other lengths nor other groups compile anything again.

    Under `stock_attention` the layers run as they are: generation would compile graphs for each of its own shapes.
    A deep copy is not compiled. Set it after recomputation, before the model is sharded. Results change by rounding.
    Raises, for the whole process, the compiler's limit of graphs a function where it is lower than this needs.
    """
    if mode not in get_args(Compile):
        raise ValueError(f"compile must be one of {', '.join(get_args(Compile))}, got {mode!r}")
    attachment_of(model)  # refuses a model whose attention a compiler would look into
    layers = marked_layers(model)
    if mode == "layers" and not layers:
        raise UserError(
            f"{type(model).__name__} does not mark its layers, which are what is compiled; use compile = 'none' with it"
        )
    if mode == "layers" and is_batch_invariant(model):
        raise UserError(
            "a batch-invariant model is not compiled: what the compiler fuses it sums in orders of its own; use "
            "compile = 'none' with it"
        )
    if mode == "layers":
        return compile_layers(model, backend=backend)
    for layer in layers:
        layer._compiled_call_impl = None
    return model


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> PreTrainedModel:
    """`set_compile` "layers", of a model that marks its layers, with any attention that compilers do not look into."""
    from torch._dynamo import config  # seconds, for who compiles

    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    options = _OF_ANY_SIZE if backend == "inductor" else None
    for layer in marked_layers(model):
        layer.compile(dynamic=True, backend=backend, options=options)
    return model
