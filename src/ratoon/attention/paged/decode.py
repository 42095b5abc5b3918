"""Attention of one new token a response, from the cache: two walks over blocks and a join."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: B responses, H heads (Hq query, Hkv key and value), D head dim, E value head dim, F blocks of
# the cache, N keys of a block.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.paged.kernels import join_kernel, walk_kernel, write_kernel
from ratoon.attention.paged.reads import PagedReads
from ratoon.attention.transfer import to_device
from ratoon.attention.triton.descriptors import padded_head_dim

SPLIT_KEYS = 512
"""Keys of one item: few enough that a lone long prompt keeps the GPU busy, many enough that sums are joined rarely."""

SHARED_ROWS = 64
OWN_ROWS = 16
"""Rows of a tile: query heads of a key head, times members. 16 is the least side of a matrix product."""

WALK_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceReads:
    """`PagedReads` in tensors that stay where they are, so that a CUDA graph may hold them; one size for all batches of
    up to so many rows, items and slots."""

    block_tokens: int
    split_keys: int
    num_slots: int
    num_prompts: int
    """Most prompts: where the responses' lengths begin."""

    blocks: Tensor
    members: Tensor
    shared: Tensor
    num_shared: Tensor
    own: Tensor
    num_own: Tensor
    lengths: Tensor
    own_table: Tensor
    prompt_tokens: Tensor
    num_slots_of: Tensor

    @property
    def own_lengths(self) -> Tensor:
        """[B] int32 view of `lengths`; add 1 for each token that is taken."""
        return self.lengths[self.num_prompts :]

    @classmethod
    def of(cls, reads: PagedReads, device: torch.device) -> "DeviceReads":
        """Tensors of just these reads."""

        def scalar(value: int) -> Tensor:
            return torch.full((1,), value, dtype=torch.int32, device=device)

        return cls(
            block_tokens=reads.block_tokens,
            split_keys=reads.split_keys,
            num_slots=max(reads.max_slots, 1),
            num_prompts=reads.num_prompts,
            blocks=to_device(reads.blocks_F, device),
            members=to_device(reads.members_X, device),
            shared=to_device(reads.shared_I, device),
            num_shared=scalar(len(reads.shared_I)),
            own=to_device(reads.own_I, device),
            num_own=scalar(len(reads.own_I)),
            lengths=to_device(reads.lengths, device),
            own_table=to_device(reads.own_table_B, device),
            prompt_tokens=to_device(reads.prompt_tokens_B, device),
            num_slots_of=to_device(reads.num_slots_B, device),
        )


def write_keys(k_BHD: Tensor, v_BHE: Tensor, k_cache_FHND: Tensor, v_cache_FHNE: Tensor, reads: DeviceReads) -> None:
    """Puts each response's new key and value where its length says. Last dims are contiguous."""
    B, Hkv, D = k_BHD.shape
    E = v_BHE.shape[2]
    write_kernel[(B, Hkv)](
        k_BHD, v_BHE, k_cache_FHND, v_cache_FHNE, reads.blocks, reads.own_table, reads.own_lengths,
        k_BHD.stride(0), k_BHD.stride(1), v_BHE.stride(0), v_BHE.stride(1),
        D=D, E=E, NUM_KV_HEADS=Hkv, BLOCK_TOKENS=reads.block_tokens,
        BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(E), num_warps=1,
    )  # fmt: skip


def decode(
    q_BHD: Tensor,
    k_cache_FHND: Tensor,
    v_cache_FHNE: Tensor,
    reads: DeviceReads,
    scoring: Scoring,
    *,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    num_programs: int = 264,
) -> Tensor:
    """[B, Hq, E] in q's dtype. The new keys stand in the cache already.

    num_programs: of each key head's walk; about as many as fill the GPU. The same sums whatever it is.
    """
    B, Hq, D = q_BHD.shape
    Hkv, E = v_cache_FHNE.shape[1], v_cache_FHNE.shape[3]
    group = Hq // Hkv
    part_out = q_BHD.new_empty(B, Hq, reads.num_slots, E, dtype=torch.float32)
    part_lse = q_BHD.new_empty(B, Hq, reads.num_slots, dtype=torch.float32)
    upcast = q_BHD.device.type == "cpu" and q_BHD.dtype == torch.bfloat16
    for items, num_items, rows in (
        (reads.shared, reads.num_shared, max(SHARED_ROWS, _rows(group))),
        (reads.own, reads.num_own, max(OWN_ROWS, _rows(group))),
    ):
        walk_kernel[(min(num_programs, max(items.shape[0], 1)), Hkv)](
            q_BHD, k_cache_FHND, v_cache_FHNE, part_out, part_lse,
            items, num_items, reads.members, reads.blocks, reads.lengths,
            # An own item's first position stands in the first half, a prompt's, 0, behind it.
            reads.prompt_tokens, reads.own_lengths, reads.prompt_tokens,
            q_BHD.stride(0), q_BHD.stride(1), scoring.softmax_scale, scoring.softcap or 1.0, window or 0,
            min(num_programs, max(items.shape[0], 1)),
            D=D, E=E, NUM_KV_HEADS=Hkv, GROUP=group, NUM_SLOTS=reads.num_slots, BLOCK_TOKENS=reads.block_tokens,
            SPLIT_KEYS=reads.split_keys, BLOCK_M=rows, BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(E),
            HAS_SOFTCAP=scoring.softcap is not None, HAS_WINDOW=window is not None, UPCAST=upcast,
            num_warps=WALK_WARPS,
        )  # fmt: skip
    out_BHE = q_BHD.new_empty(B, Hq, E)
    join_kernel[(B, Hq)](
        part_out, part_lse, sinks_H, out_BHE, reads.num_slots_of, out_BHE.stride(0), out_BHE.stride(1),
        E=E, NUM_HEADS=Hq, NUM_SLOTS=reads.num_slots, BLOCK_S=_power_of_two(reads.num_slots),
        BLOCK_E=padded_head_dim(E), HAS_SINKS=sinks_H is not None, num_warps=1,
    )  # fmt: skip
    return out_BHE


def max_members(group: int) -> int:
    """Responses of one shared item, for so many query heads of a key head."""
    return max(SHARED_ROWS, _rows(group)) // group


def _rows(group: int) -> int:
    return max(_power_of_two(group), OWN_ROWS)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
