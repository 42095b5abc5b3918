"""Attention over blocks as transformers calls it, and as torch.compile sees it: an opaque node in a layer's graph.

A number on the host, in a tensor, stands for the pass: no guard of a graph looks into tensors, so that one graph
serves every pass.
"""

# Shape letters: R rows of a pass, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ratoon.attention.kernel import Scoring
from ratoon.rollout.engines.paged.block_cache import BlockCache, LayerCache

BLOCK_ATTENTION = "ratoon_paged_blocks"
"""Name under which transformers finds `block_attention`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """What one layer brings to its attention, for the rows of one pass."""

    q_RHD: Tensor
    k_RHD: Tensor
    v_RHE: Tensor
    sinks_H: Tensor | None
    scoring: Scoring

    window: int | None
    """A row reads the keys at most `window - 1` positions before it; None: all."""


class Attention(Protocol):
    """What the rows of one pass write and read, the same in every layer."""

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """[R, Hq, E] in q's dtype. The keys and values enter the layer's cache before it is read."""
        ...


class PagedPass:
    """A forward pass over a cache, or many that a CUDA graph repeats. Its layers come in their order."""

    def __init__(self, cache: BlockCache, attention: Attention) -> None:
        self._cache = cache
        self._attention = attention
        self._num_layers = 0
        number = next(_NUMBERS)
        _PASSES[number] = self
        self.number = torch.tensor(number)
        """The `paged_pass` keyword of the model."""

    def begin(self) -> None:
        """The next layer is the first."""
        self._num_layers = 0

    def attend_next(self, rows: LayerRows) -> Tensor:
        """Of the next layer."""
        layer = self._cache.layer(self._num_layers, rows.k_RHD, rows.v_RHE)
        self._num_layers += 1
        return self._attention.attend(layer, rows)


_PASSES: WeakValueDictionary[int, PagedPass] = WeakValueDictionary()
_NUMBERS = count()


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_pass: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface, for the packed rows of one pass.

    query: [1, Hq, R, D]. key, value: [1, Hkv, R, D]. paged_pass: `PagedPass.number`, from the engine.
    """
    assert paged_pass is not None, f"{type(module).__name__}'s attention was called without the engine's pass"
    assert attention_mask is None, "block attention derives its mask from the tables, got one from the model"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_RHD, k_RHD, v_RHE = (x[0].transpose(0, 1) for x in (query, key, value))
    return _attend_op(q_RHD, k_RHD, v_RHE, s_aux, paged_pass, sliding_window, scale, softcap)[None], None


@torch.library.custom_op(
    "ratoon::attend_blocks",
    mutates_args=(),  # the caches are no inputs
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor number, int? window, float scale, float? softcap)"
    " -> Tensor",
)
def _attend_op(
    q_RHD: Tensor,
    k_RHD: Tensor,
    v_RHE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> Tensor:
    paged_pass = _PASSES.get(int(number))
    assert paged_pass is not None, f"pass {int(number)} is over, and a layer still attends in it"
    rows = LayerRows(
        q_RHD=q_RHD,
        k_RHD=k_RHD,
        v_RHE=v_RHE,
        sinks_H=sinks_H,
        scoring=Scoring(softmax_scale=softmax_scale, softcap=softcap),
        window=window,
    )
    return paged_pass.attend_next(rows).contiguous()


@_attend_op.register_fake
def _(
    q_RHD: Tensor,
    k_RHD: Tensor,
    v_RHE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> Tensor:
    return q_RHD.new_empty(*q_RHD.shape[:2], v_RHE.shape[2])


AttentionInterface.register(BLOCK_ATTENTION, block_attention)
