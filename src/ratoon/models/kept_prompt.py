"""A prompt computed once for responses that do not fit one pass.

The prompt goes forward once, microbatches of its responses read its keys and values, their gradients add up there, and
the prompt goes backward once. Exact: a response reads nothing of its prompt but keys, values and, for its first token,
the last row's hidden state.
"""

# Shape letters: P prompt tokens, C channels.

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.distributed import is_sharded
from ratoon.layout import PackedLayout, pack_documents
from ratoon.models.forest import Forest
from ratoon.models.interface import attachment_of
from ratoon.models.kept_keys import KeptKeys, leaf_of


def can_keep_prompts(model: PreTrainedModel) -> bool:
    """Whether `KeptPrompt.keep` takes the model."""
    if _passes_with_others(model):
        return False
    classes = tuple({call.module_class for call in attachment_of(model).calls})
    layers = [getattr(module, "layer_idx", None) for module in model.modules() if isinstance(module, classes)]
    return len(set(layers)) == len(layers) and all(isinstance(layer, int) for layer in layers)


class KeptPrompt:
    """What `forward_logprobs(..., kept=...)` goes on from. Make it with `keep`.

    With gradients: after the backward pass of each microbatch call `add_gradients`, and `backward` once after the last.
    """

    def __init__(self, token_ids_P: NDArray[np.integer[Any]], keys: KeptKeys, last_hidden_1C: Tensor) -> None:
        self.token_ids_P = token_ids_P
        self.keys = keys
        keys.last_hidden_1C = leaf_of(last_hidden_1C)
        pairs = [*keys.pairs(), (last_hidden_1C, keys.last_hidden_1C)]
        self._pairs = [(made, leaf) for made, leaf in pairs if made.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._pairs)

    @classmethod
    def keep(cls, model: PreTrainedModel, token_ids_P: NDArray[np.integer[Any]]) -> "KeptPrompt":
        """One forward pass of the prompt; with gradients on, its graph is kept until `backward`.

        Raises ValueError for an empty prompt, and for a model that is sharded or shares layouts between ranks: all
        ranks would have to make the same passes.
        """
        attachment = attachment_of(model)
        if _passes_with_others(model):
            raise ValueError(
                "a prompt is kept by one rank for itself, and the ranks of a sharded or sequence-parallel model make "
                "their passes together; compute the prompt with each microbatch instead"
            )
        token_ids_P = np.asarray(token_ids_P, np.int64)
        if token_ids_P.ndim != 1 or token_ids_P.size == 0:
            raise ValueError(f"a prompt to keep needs at least one token id, got shape {token_ids_P.shape}")
        keys = KeptKeys(token_ids_P.size)
        forest = Forest.build(pack_documents([token_ids_P]), device=model.device, impl=attachment.impl, keeps=keys)
        hidden_PC = model.base_model(input_ids=forest.token_ids_1T, forest=forest, use_cache=False)[0][0]
        return cls(token_ids_P, keys, hidden_PC[-1:])

    @property
    def num_rows(self) -> int:
        return self.token_ids_P.size

    def keys_of(self, layout: PackedLayout) -> KeptKeys:
        """For a layout that is this prompt and what continues it. Raises ValueError for any other."""
        P = self.num_rows
        is_one_tree = bool((layout.segment_parent[1:] >= 0).all())
        begins = layout.num_segments > 0 and layout.segment_offsets[1] == P
        if not (begins and is_one_tree and np.array_equal(layout.token_ids_T[:P], self.token_ids_P)):
            raise ValueError(
                f"the layout must be one group with the kept prompt of {P:,} tokens, got "
                f"{layout.num_segments} segments of {layout.num_rows:,} rows; "
                "pack the same group's responses with pack_groups"
            )
        return self.keys

    def add_gradients(self) -> None:
        """Adds what a microbatch's backward has left to sums in at least float32."""
        for index, (_, leaf) in enumerate(self._pairs):
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            total = self._sums[index]
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[index] = gradient.to(wide) if total is None else total.add_(gradient)

    def backward(self) -> None:
        """The prompt's own backward pass, from the sums; frees its graph."""
        reached = [(made, total) for (made, _), total in zip(self._pairs, self._sums, strict=True) if total is not None]
        self._pairs, self._sums = [], []
        if reached:
            torch.autograd.backward([made for made, _ in reached], [total.to(made.dtype) for made, total in reached])


def _passes_with_others(model: PreTrainedModel) -> bool:
    """Whether every pass is one of all ranks, or of some."""
    return is_sharded(model) or attachment_of(model).sequence_group is not None
