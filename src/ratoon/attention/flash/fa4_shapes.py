"""Head dims and tiles that flash-attn-4 has, by GPU. The tiles are the package's choice: lists must be made of them."""

from dataclasses import dataclass

from ratoon.attention.alignment import round_up


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBuild:
    """How a forward kernel that walks lists is built. None: as the package would, by head dims and GPU."""

    lists: Tile
    """What an entry of a block list stands for: rows of one or more of the kernel's tiles, keys of one."""

    tile: Tile | None = None

    probs_in_registers: bool | None = None
    """The second product reads its left side from registers instead of shared memory."""


def head_dims(head_dim: int, v_head_dim: int, capability: int) -> tuple[int, int]:
    """The smallest pair that the kernels have, of query and value, into which the given pair fits.

    capability: major compute capability. On 9 any multiple of 8 to 256; values no longer than queries, whose
    tiles were chosen for that. On 10 and 11 to 128 each, (192, 128) and (256, 256).
    """
    head_dim, v_head_dim = (round_up(dim, 8) for dim in (max(head_dim, v_head_dim), v_head_dim))
    if capability == 9 or head_dim <= 128:
        return head_dim, v_head_dim
    return (192, 128) if head_dim <= 192 and v_head_dim <= 128 else (256, 256)


def backward_head_dims(head_dim: int, v_head_dim: int, capability: int, *, one: bool) -> tuple[int, int]:
    """Of `head_dims`, the smallest pair that the backward kernels have. one: for queries, keys and values alike.

    On 9 the sums of dq are laid out by multiples of 32: between them dq came out wrong (4.0.0b36). Of unlike head dims
    only (192, 128) has been seen to compile there: (64, 32) does not.
    """
    assert v_head_dim <= head_dim, f"values of {v_head_dim} are longer than queries of {head_dim}: not of `head_dims`"
    if capability == 9:
        head_dim, v_head_dim = round_up(head_dim, 32), round_up(v_head_dim, 32)
        one = one or (head_dim, v_head_dim) != (192, 128)
    if one:
        v_head_dim = head_dim
    return head_dims(head_dim, v_head_dim, capability)


def has_block_kernels(head_dim: int, capability: int) -> bool:
    """The kernels for head dim 256 on 10 and 11 are others, that know no lists."""
    return capability == 9 or head_dim <= 192


def forward_build(head_dim: int, v_head_dim: int, capability: int) -> ForwardBuild:
    if capability == 9 and 96 < head_dim <= 128:
        # 1.5 times the rows to a key read pay for probabilities that take the way through shared memory.
        tile = Tile(192, 128)
        return ForwardBuild(lists=tile, tile=tile, probs_in_registers=False)
    return ForwardBuild(lists=_forward_tile(head_dim, v_head_dim, capability))


def _forward_tile(head_dim: int, v_head_dim: int, capability: int) -> Tile:
    if capability != 9:
        return Tile(256, 128)  # two tiles of 128 rows at a time
    if head_dim <= 64:
        return Tile(192, 128)
    if head_dim <= 96:
        return Tile(192, 144)
    if head_dim <= 192:
        return Tile(128, 128 if v_head_dim <= 128 else 112)
    return Tile(128, 80)
