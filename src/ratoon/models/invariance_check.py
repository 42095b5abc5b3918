"""A group scored alone and beside others, before a model is trusted to be batch-invariant."""

# Shape letters: T rows, M scored tokens.

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.layout import pack_groups
from ratoon.models.forest import Forest
from ratoon.models.forward import score_forest
from ratoon.models.interface import attachment_of
from ratoon.models.self_check import evaluation
from ratoon.models.shape import model_shape
from ratoon.types import Prompt, Response, RolloutGroup, UserError

_BESIDE = (9, (5, 2))
_CHECKED = (40, (3, 30, 1))
"""Prompt and responses; together more rows than a tile has, so that some stand in other tiles."""


@torch.no_grad()
def check_invariance(model: PreTrainedModel) -> None:
    """Raises UserError unless an attached model gives a group the same log-probs, bit by bit, alone and behind another.

    The error names the first module whose output differs.
    """
    vocab_size = model_shape(model.config).vocab_size
    rng = np.random.default_rng(11)
    beside, checked = (
        RolloutGroup(
            Prompt(name, rng.integers(0, vocab_size, P)),
            tuple(Response(rng.integers(0, vocab_size, R)) for R in lengths),
        )
        for name, (P, lengths) in (("beside", _BESIDE), ("checked", _CHECKED))
    )
    with evaluation(model):
        alone_M, together_M = _score(model, [checked]), _score(model, [beside, checked])
        gap = float((alone_M - together_M[-alone_M.shape[0] :]).abs().max())
        if gap == 0.0:
            return
        culprit = _first_difference(model, beside, checked)
    raise UserError(
        f"{type(model).__name__} failed the check of model.batch_invariant: a group scored alone and beside another "
        f"differs by up to {gap:.2e} nats, first in {culprit}; "
        "its arithmetic depends on what else is in a pass. Set model.batch_invariant to false for this model"
    )


def _score(model: PreTrainedModel, groups: Sequence[RolloutGroup]) -> Tensor:
    forest = Forest.build(pack_groups(groups), device=model.device, impl=attachment_of(model).impl)
    return score_forest(model, forest)[0]


def _first_difference(model: PreTrainedModel, beside: RolloutGroup, checked: RolloutGroup) -> str:
    """The module, in the order in which they run, whose rows of the checked group differ."""
    outputs: list[list[tuple[str, Tensor]]] = []
    for groups in ([checked], [beside, checked]):
        found: list[tuple[str, Tensor]] = []
        hooks = [module.register_forward_hook(_recorder(name, found)) for name, module in model.named_modules()]
        try:
            _score(model, groups)
        finally:
            for hook in hooks:
                hook.remove()
        outputs.append(found)
    num_rows = pack_groups([checked]).num_rows
    for (name, alone), (_, together) in zip(*outputs, strict=True):
        if alone.ndim > 1 and not torch.equal(alone, together[:, -num_rows:]):
            return name
    return "the head"


def _recorder(name: str, found: list[tuple[str, Tensor]]):
    def record(_: nn.Module, __: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            found.append((name, first))

    return record
