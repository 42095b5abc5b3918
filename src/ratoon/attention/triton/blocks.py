"""Tile sizes, by measurement."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tiles of the portable kernels. More warps hold more accumulators; more stages overlap more loads."""

    forward_rows: int
    forward_keys: int
    forward_warps: int
    forward_stages: int

    looks_ahead: bool
    """The forward pass multiplies the next keys while it weighs this tile's: faster where registers suffice."""

    item_rows: int
    """Rows that a program of dK and dV takes at a time."""
    item_keys: int
    """Keys that it owns."""

    rows: int
    """Rows that a program of dQ owns."""
    keys: int
    """Keys that it takes at a time."""

    backward_warps: int
    backward_stages: int


GROUP_ROWS = 64
"""Rows or keys that a group of warps owns on Hopper: the height of its matrix products."""


@dataclass(frozen=True, slots=True)
class HopperBlocks:
    """Tiles of the kernels in `hopper`, and how many visiting ones shared memory holds at once."""

    forward_rows: int
    forward_keys: int
    forward_stages: int
    item_rows: int
    item_keys: int
    item_stages: int
    rows: int
    keys: int
    key_stages: int
    value_stages: int

    items_by_role: bool = False
    """The two groups of an item share its keys, and split dK and dV: for heads whose gradients fill the registers."""

    is_wide: bool = False
    """Both passes split the head dim between the groups: `forward_wide.py`, `backward_wide.py`."""

    forward_row_stages: int = 2
    """In the forward pass, 2: the next rows come while the last are read, where shared memory has room for them."""


_SMALLEST = Blocks(16, 16, 4, 1, True, 16, 16, 16, 16, 4, 1)

# (largest bytes of a head padded, blocks), for 227 KiB of shared memory a multiprocessor.
_HOPPER = (
    (128, Blocks(128, 128, 8, 3, True, 64, 128, 128, 128, 8, 3)),
    (256, Blocks(64, 64, 4, 3, True, 64, 128, 128, 64, 8, 3)),
    (512, Blocks(128, 32, 8, 3, True, 32, 64, 64, 32, 8, 2)),
    (1024, Blocks(64, 64, 8, 1, False, 16, 64, 64, 16, 8, 1)),
    (2048, Blocks(32, 16, 8, 1, False, 16, 16, 16, 16, 8, 1)),
)

# For about 100 KiB: Ampere and Ada consumer cards, AMD.
_SMALL_SHARED_MEMORY = (
    (128, Blocks(128, 64, 4, 2, False, 64, 64, 64, 64, 4, 2)),
    (256, Blocks(64, 64, 4, 2, False, 32, 64, 64, 32, 4, 1)),
    (512, Blocks(64, 32, 8, 1, False, 16, 32, 32, 16, 8, 1)),
    (2048, Blocks(16, 16, 4, 1, False, 16, 16, 16, 16, 4, 1)),
)


# Float32 is multiplied without tensor cores: larger tiles take minutes to compile.
_FLOAT32 = (
    (512, Blocks(32, 32, 4, 1, False, 32, 32, 32, 32, 4, 1)),
    (2048, Blocks(16, 16, 4, 1, False, 16, 16, 16, 16, 4, 1)),
)


HOPPER_BLOCKS = {
    64: HopperBlocks(128, 128, 2, 64, 128, 2, 128, 128, 2, 2),
    128: HopperBlocks(128, 128, 2, 64, 128, 3, 128, 64, 2, 2),
    256: HopperBlocks(128, 64, 2, 64, 64, 2, 128, 64, 2, 1, items_by_role=True, forward_row_stages=1),
    512: HopperBlocks(64, 64, 1, 64, 64, 1, 64, 32, 1, 1, is_wide=True),
}
"""By head dim, padded, of queries, keys and values alike: the calls that the kernels in `hopper` serve."""


def choose_blocks(head_bytes: int, element_size: int, shared_memory_bytes: int | None) -> Blocks:
    """head_bytes: of the larger head, padded. None bytes of shared memory: the interpreter, for which small is fast."""
    if shared_memory_bytes is None:
        return _SMALLEST
    of_machine = _HOPPER if shared_memory_bytes >= 200 * 1024 else _SMALL_SHARED_MEMORY
    for largest, blocks in _FLOAT32 if element_size == 4 else of_machine:
        if head_bytes <= largest:
            return blocks
    raise AssertionError(f"a head of {head_bytes} bytes is over what the registry lets through")
