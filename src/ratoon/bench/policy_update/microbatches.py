"""One update's work as each variant packs it: our shared layout, sequences with their own prompts, keys copied.

All score the same tokens, in the same order, with the same `linear_logprob` on the rows that predict them. Peers run
through the same transformers layers, with another attention function in transformers' table.
"""

# Shape letters: T rows, U rows after replication, M scored tokens, H heads (Hq query, Hkv key and value), D head dim,
# N sequences.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ratoon.algorithms.losses import clipped_policy_loss
from ratoon.attention import AttentionRequest, resolve_impl
from ratoon.bench.attention.peers import Copies, cu_seqlens_of, segment_paths
from ratoon.bench.policy_update.peer_attention import PeerAttention, PeerKernel, Runs, load_kernel
from ratoon.bench.policy_update.variants import Impl, Variant
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import forward_logprobs, model_shape
from ratoon.ops import linear_logprob
from ratoon.types import Prompt, RolloutGroup

_PACKED = "ratoon-bench-packed"
"""The peers' name in transformers' tables of attention and mask functions."""

_SEED = 1


class Pack(Protocol):
    """One microbatch's tokens as a variant stores them."""

    @property
    def num_rows(self) -> int: ...

    def score(self, model: PreTrainedModel) -> Tensor:
        """[M] log-probs, differentiable, inside `attending`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A part of the update's responses, and what the loss knows of them."""

    pack: Pack
    advantages_M: Tensor
    weights_M: Tensor
    """One over the scored tokens of the whole update."""

    def backward(self, model: PreTrainedModel) -> Tensor:
        """Forward, loss and backward; gradients add up in the parameters. Returns the log-probs, [M], detached."""
        logprobs_M = self.pack.score(model)
        clipped_policy_loss(
            logprobs_M, logprobs_M.detach(), self.advantages_M, self.weights_M, clip_low=0.2, clip_high=0.2
        ).loss.backward()
        return logprobs_M.detach()


@dataclass(frozen=True, kw_only=True)
class SharedPack:
    """Ours: each prompt once through everything. The plan is made anew for every microbatch, as in training."""

    layout: PackedLayout

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    def score(self, model: PreTrainedModel) -> Tensor:
        return forward_logprobs(model, self.layout)[0]


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Rows of a layout as a peer stores them, on their device."""

    token_ids_1U: Tensor
    positions_1U: Tensor
    predictor_row_M: Tensor
    target_M: Tensor

    @classmethod
    def of(
        cls, layout: PackedLayout, row_U: np.ndarray, predictor_row_M: np.ndarray, device: torch.device
    ) -> "_Tokens":
        return cls(
            token_ids_1U=torch.tensor(layout.token_ids_T[row_U], device=device)[None],
            positions_1U=torch.tensor(layout.positions_T[row_U], dtype=torch.int64, device=device)[None],
            predictor_row_M=torch.tensor(predictor_row_M, dtype=torch.int64, device=device),
            target_M=torch.tensor(layout.target_M, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class VarlenPack:
    """A peer's rows, through transformers' layers with the peer's attention."""

    tokens: _Tokens
    attention: PeerAttention

    @property
    def num_rows(self) -> int:
        return self.tokens.token_ids_1U.shape[1]

    def score(self, model: PreTrainedModel) -> Tensor:
        tokens = self.tokens
        hidden_UC = model.base_model(
            input_ids=tokens.token_ids_1U,
            position_ids=tokens.positions_1U,
            peer_attention=self.attention,
            use_cache=False,
        )[0][0]
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear), "the decoders here have a plain head"
        return linear_logprob(hidden_UC.index_select(0, tokens.predictor_row_M), head.weight, tokens.target_M)[0]


@dataclass(frozen=True, kw_only=True)
class PlainPack:
    """One sequence through a model with transformers' own attention, and its own logits."""

    token_ids_1S: Tensor
    num_prompt_tokens: int

    @property
    def num_rows(self) -> int:
        return self.token_ids_1S.shape[1]

    def score(self, model: PreTrainedModel) -> Tensor:
        logits_SV = model(input_ids=self.token_ids_1S, use_cache=False).logits[0]
        logits_MV = logits_SV[self.num_prompt_tokens - 1 : -1]
        logprobs_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(dim=-1)
        return logprobs_MV.gather(1, self.token_ids_1S[0, self.num_prompt_tokens :, None])[:, 0]


def pack_plain(groups: Sequence[RolloutGroup], device: torch.device) -> list[Microbatch]:
    """A microbatch for each sequence: what the variants are checked against."""
    return with_advantages(
        [
            ([single], PlainPack(token_ids_1S=_whole(single, device), num_prompt_tokens=single.prompt.token_ids.size))
            for single in alone_groups(groups)
        ],
        device,
    )


def pack_update(
    groups: Sequence[RolloutGroup], variant: Variant, sequences: int, device: torch.device
) -> list[Microbatch]:
    """The groups' update in microbatches of `variant`.

    sequences: of a replicated microbatch. Ours and the K/V copies take all groups in one.
    Raises CannotRunError where the variant's kernels are not here.
    """
    kernel = None if variant.impl == "auto" else load_kernel(variant.impl, device)
    parts = _cut(groups, sequences) if variant.layout == "replicated" else [list(groups)]
    return with_advantages([(part, _pack(pack_groups(part), variant.impl, kernel, device)) for part in parts], device)


@contextmanager
def attending(model: PreTrainedModel, variant: Variant) -> Iterator[None]:
    """Inside, the model's layers attend as the variant does. It holds for the backward pass too, which may compute
    layers again. Compiled layers stay compiled."""
    previous = model.config._attn_implementation
    assert previous is not None, "transformers gives every model an attention implementation"
    if variant.is_peer:
        model.set_attn_implementation(_PACKED)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def alone_groups(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Each response in a group of its own, so that packing shares nothing."""
    return [
        RolloutGroup(Prompt(f"{group.prompt.id}/{index}", group.prompt.token_ids), (response,))
        for group in groups
        for index, response in enumerate(group.responses)
    ]


def kernels_of(variant: Variant, model: PreTrainedModel, num_rows: int) -> str:
    """What the row says of attention's kernels."""
    if variant.is_peer:
        return "torch's FlashAttention-2, varlen" if variant.impl == "fa2" else "flash-attn-4, varlen"
    shape = model_shape(model.config)
    request = AttentionRequest(
        device_type=model.device.type,
        dtype=model.dtype,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        num_rows=num_rows,
    )
    return resolve_impl(request, "auto").kernels


def with_advantages(parts: Sequence[tuple[Sequence[RolloutGroup], Pack]], device: torch.device) -> list[Microbatch]:
    """An advantage for each response, in order, whatever the parts are."""
    lengths = [[response.num_tokens for group in groups for response in group.responses] for groups, _ in parts]
    total = sum(sum(of_part) for of_part in lengths)
    rng = np.random.default_rng(_SEED)
    return [
        Microbatch(
            pack=pack,
            advantages_M=torch.tensor(
                np.repeat(rng.standard_normal(len(of_part)), of_part), dtype=torch.float32, device=device
            ),
            weights_M=torch.full((sum(of_part),), 1.0 / total, device=device),
        )
        for of_part, (_, pack) in zip(lengths, parts, strict=True)
    ]


def _whole(single: RolloutGroup, device: torch.device) -> Tensor:
    """[1, P + R]."""
    return torch.tensor(np.concatenate([single.prompt.token_ids, single.responses[0].token_ids]), device=device)[None]


def _pack(layout: PackedLayout, impl: Impl, kernel: PeerKernel | None, device: torch.device) -> Pack:
    if impl == "auto":
        return SharedPack(layout=layout)
    assert kernel is not None, "a peer has a kernel"
    return _copied_keys(layout, kernel, device) if impl == "kv-copy-fa4" else _replicated(layout, kernel, device)


def _replicated(layout: PackedLayout, kernel: PeerKernel, device: torch.device) -> VarlenPack:
    """Every sequence whole, one after another: today's packed training."""
    rows = [layout.sequence_rows(sequence) for sequence in range(layout.num_sequences)]
    lengths = [of_sequence.size for of_sequence in rows]
    row_U = np.concatenate(rows)
    starts_N = np.cumsum([0, *lengths[:-1]])
    # A row's position in its sequence is its place in the copy.
    predictor_row_M = starts_N[layout.sequence_of_M] + layout.positions_T[layout.predictor_row_M]
    cu_seqlens = cu_seqlens_of(lengths, device)
    longest = max(lengths)
    return VarlenPack(
        tokens=_Tokens.of(layout, row_U, predictor_row_M, device),
        attention=PeerAttention(
            kernel=kernel,
            runs=Runs(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest),
        ),
    )


def _copied_keys(layout: PackedLayout, kernel: PeerKernel, device: torch.device) -> VarlenPack:
    """Rows as in our layout; in every layer each response reads a copy of the keys and values of [prompt, response]."""
    paths = segment_paths(layout)
    lengths = np.diff(layout.segment_offsets).tolist()
    runs = Runs(
        cu_seqlens_q=cu_seqlens_of(lengths, device),
        cu_seqlens_k=cu_seqlens_of([path.size for path in paths], device),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(path.size for path in paths),
    )
    copies = Copies.of(np.concatenate(paths), layout.num_rows, device)
    return VarlenPack(
        tokens=_Tokens.of(layout, np.arange(layout.num_rows), layout.predictor_row_M, device),
        attention=PeerAttention(kernel=kernel, runs=runs, key_copies=copies),
    )


def _cut(groups: Sequence[RolloutGroup], sequences: int) -> list[list[RolloutGroup]]:
    """So many sequences together."""
    alone = alone_groups(groups)
    return [alone[start : start + sequences] for start in range(0, len(alone), sequences)]


def _attend_packed(
    module: nn.Module,
    query_1HUD: Tensor,
    key_1HUD: Tensor,
    value_1HUD: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    peer_attention: PeerAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' interface: [1, H, U, D] -> [1, U, H, D]."""
    assert attention_mask is None, "the runs are the mask"
    q_UHD, k_UHD, v_UHD = (x[0].transpose(0, 1) for x in (query_1HUD, key_1HUD, value_1HUD))
    return peer_attention(q_UHD, k_UHD, v_UHD, scaling)[None], None


AttentionInterface.register(_PACKED, _attend_packed)
AttentionMaskInterface.register(_PACKED, lambda *_, **__: None)
