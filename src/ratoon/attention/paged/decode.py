"""Attention of one new token a response, from the cache: a walk over blocks and a join."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: B responses, H heads (Hq query, Hkv key and value), D head dim, E value head dim, F blocks of
# the cache, N keys of a block.

import numpy as np
import torch
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.paged.kernels import join_kernel, walk_kernel, write_kernel
from ratoon.attention.paged.reads import ITEM_FIELDS, PagedReads, ReadSizes
from ratoon.attention.triton.descriptors import padded_head_dim
from ratoon.attention.triton.scores import needs_upcast

SPLIT_KEYS = 512
"""Keys of one item: few enough that a lone long prompt keeps the GPU busy, many enough that sums are joined rarely."""

SHARED_ROWS = 32
OWN_ROWS = 16
"""Rows of a tile: query heads of a key head, times members. 16 is the least side of a matrix product. 32 hold most
groups; 64 would leave room for one program less on a multiprocessor, for own tokens too (benchmarks/LOG.md)."""

WALK_WARPS = 4

_PREFETCHED_BYTES = 256
"""Of one key. The next tile is under way while one is computed, where two of them leave room for other programs."""


class DeviceReads:
    """`PagedReads` in tensors that stay where they are, so that a CUDA graph may hold them."""

    def __init__(self, room: ReadSizes, block_tokens: int, split_keys: int, device: torch.device) -> None:
        """For all batches of up to so many rows, items and slots."""
        self.room = room
        self.block_tokens = block_tokens
        self.split_keys = split_keys
        is_cuda = device.type == "cuda"
        lengths = (1, 1, room.prompts, room.rows, room.rows, room.rows, room.rows, room.rows)
        sizes = (*lengths, room.shared_items * len(ITEM_FIELDS), room.own_items * len(ITEM_FIELDS), room.blocks)
        # One copy for all. The host's half is page-locked, so that it does not wait for what is queued.
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._parts = tuple(part.numpy() for part in self._host.split(sizes))
        (
            self.num_shared,
            self.num_own,
            self.prompt_lengths,
            self.own_lengths,
            self.own_table,
            self.prompt_table,
            self.first_position,
            self.num_slots_of,
            self.shared,
            self.own,
            self.blocks,
        ) = self._device.split(sizes)

    @classmethod
    def of(cls, reads: PagedReads, device: torch.device) -> "DeviceReads":
        """Tensors of just these reads."""
        found = cls(reads.sizes, reads.block_tokens, reads.split_keys, device)
        found.load(reads)
        return found

    def clear(self) -> None:
        """No reads: every response is padding."""
        self._device.zero_()

    def load(self, reads: PagedReads) -> None:
        """What the device held before is overwritten in the order of its stream, and responses beyond these become
        padding. The copy of an earlier call must have run."""
        assert reads.sizes.fit_in(self.room), f"reads of {reads.sizes} do not fit {self.room}"
        values = (
            np.array([len(reads.shared_I)]),
            np.array([len(reads.own_I)]),
            reads.prompt_tokens_U,
            reads.own_tokens_B,
            reads.own_table_B,
            reads.prompt_table_B,
            reads.first_position_B,
            reads.num_slots_B,
            reads.shared_I.ravel(),
            reads.own_I.ravel(),
            reads.blocks_F,
        )
        for part, value in zip(self._parts, values, strict=True):
            part[: value.size] = value
            part[value.size :] = 0
        self._device.copy_(self._host, non_blocking=True)


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

    num_programs: of each key head, for prompts, and as many for own tokens; about as many as fill the GPU. The same
    sums whatever it is.
    """
    B, Hq, D = q_BHD.shape
    Hkv, E = v_cache_FHNE.shape[1], v_cache_FHNE.shape[3]
    group = Hq // Hkv
    num_slots = reads.room.slots
    part_out = q_BHD.new_empty(B, Hq, num_slots, E, dtype=torch.float32)
    part_lse = q_BHD.new_empty(B, Hq, num_slots, dtype=torch.float32)
    shared_programs, own_programs = (min(num_programs, x) for x in (reads.room.shared_items, reads.room.own_items))
    walk_kernel[(Hkv, shared_programs + own_programs)](
        q_BHD, k_cache_FHND, v_cache_FHNE, part_out, part_lse,
        reads.shared, reads.num_shared, reads.own, reads.num_own, reads.blocks, reads.prompt_lengths, reads.own_lengths,
        reads.first_position, q_BHD.stride(0), q_BHD.stride(1), scoring.softmax_scale, scoring.softcap or 1.0,
        window or 0, shared_programs, own_programs,
        D=D, E=E, NUM_KV_HEADS=Hkv, GROUP=group, NUM_SLOTS=num_slots, BLOCK_TOKENS=reads.block_tokens,
        SPLIT_KEYS=reads.split_keys, SHARED_ROWS=max(SHARED_ROWS, _rows(group)), OWN_ROWS=_rows(group),
        BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(E), HAS_SOFTCAP=scoring.softcap is not None,
        HAS_WINDOW=window is not None, UPCAST=needs_upcast(q_BHD), num_warps=WALK_WARPS,
        num_stages=_stages(max(D, E) * q_BHD.element_size()),
    )  # fmt: skip
    out_BHE = q_BHD.new_empty(B, Hq, E)
    join_kernel[(B, Hq)](
        part_out, part_lse, sinks_H, out_BHE, reads.num_slots_of, out_BHE.stride(0), out_BHE.stride(1),
        E=E, NUM_HEADS=Hq, NUM_SLOTS=num_slots, BLOCK_S=_power_of_two(num_slots),
        BLOCK_E=padded_head_dim(E), HAS_SINKS=sinks_H is not None, num_warps=1,
    )  # fmt: skip
    return out_BHE


def max_members(group: int) -> int:
    """Responses of one shared item, for so many query heads of a key head."""
    return max(SHARED_ROWS, _rows(group)) // group


def _stages(key_bytes: int) -> int:
    """Of Triton's pipeline. Its first two fetch the tile's block number: with 5, two tiles are held."""
    return 5 if key_bytes <= _PREFETCHED_BYTES else 3


def _rows(group: int) -> int:
    return max(_power_of_two(group), OWN_ROWS)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
