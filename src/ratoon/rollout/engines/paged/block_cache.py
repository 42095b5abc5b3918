"""Keys and values of the responses in flight, in blocks."""

# Shape letters: R rows of a pass, K key heads, D head dim.

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    k_cache: Tensor
    """[num_blocks, K, block, D]."""

    v_cache: Tensor
    """[num_blocks, K, block, Dv]."""


class BlockCache:
    """Keys and values of all layers; a layer's are made, as zeros, in the shape and dtype it first writes."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int, k_RKD: Tensor, v_RKD: Tensor) -> LayerCache:
        """The cache of a layer that writes such keys and values."""
        if index not in self._layers:
            self._layers[index] = LayerCache(self._made_for(k_RKD), self._made_for(v_RKD))
        return self._layers[index]

    def _made_for(self, x_RKD: Tensor) -> Tensor:
        _, num_heads, width = x_RKD.shape
        return x_RKD.new_zeros(self.num_blocks, num_heads, self.block_tokens, width)
