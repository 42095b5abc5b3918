"""Which keys a block of consecutive rows can read, as a few ranges: the schedule of the reference."""

# Shape letters: T rows, S segments.

from bisect import bisect_right
from dataclasses import dataclass

from ratoon.attention.plan import AttentionPlan

MAX_BLOCK_ROWS = 256
MAX_BLOCK_SCORES = 1 << 20
"""Rows times keys of one block, for one head. Bounds what the reference holds at a time."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [start, end) and every key that one of them may read."""

    start: int
    end: int

    key_ranges: tuple[tuple[int, int], ...]
    """Disjoint half-open row ranges, ascending."""


def build_row_blocks(plan: AttentionPlan) -> tuple[RowBlock, ...]:
    """Blocks that cover all rows in order. Keys outside every row's path or window are left out."""
    layout, window = plan.layout, plan.window
    offsets: list[int] = layout.segment_offsets.tolist()
    parents: list[int] = layout.segment_parent.tolist()
    first_positions: list[int] = layout.positions_T[layout.segment_offsets[:-1]].tolist()
    blocks: list[RowBlock] = []
    start = 0
    while start < layout.num_rows:
        end = min(start + MAX_BLOCK_ROWS, layout.num_rows)
        ranges = _key_ranges(start, end, offsets, parents, first_positions, window)
        num_keys = sum(stop - first for first, stop in ranges)
        allowed_rows = max(MAX_BLOCK_SCORES // num_keys, 1)
        if end - start > allowed_rows:
            end = start + allowed_rows
            ranges = _key_ranges(start, end, offsets, parents, first_positions, window)
        blocks.append(RowBlock(start, end, ranges))
        start = end
    return tuple(blocks)


def _key_ranges(
    start: int, end: int, offsets: list[int], parents: list[int], first_positions: list[int], window: int | None
) -> tuple[tuple[int, int], ...]:
    """The rows on the paths of rows [start, end), cut to the window of the earliest row of each segment."""
    # Segment -> the lowest position that a row of the block reads in it.
    lowest_position: dict[int, int] = {}
    segment = bisect_right(offsets, start) - 1
    while segment < len(parents) and offsets[segment] < end:
        first_row = max(start, offsets[segment])
        position = first_positions[segment] + first_row - offsets[segment]
        lowest = 0 if window is None else max(position - window + 1, 0)
        ancestor = segment
        while ancestor >= 0 and lowest_position.get(ancestor, lowest + 1) > lowest:
            lowest_position[ancestor] = lowest
            ancestor = parents[ancestor]
        segment += 1

    ranges: list[tuple[int, int]] = []
    for segment in sorted(lowest_position):
        first = offsets[segment] + max(lowest_position[segment] - first_positions[segment], 0)
        stop = min(offsets[segment + 1], end)
        if first >= stop:  # the window has left this ancestor behind
            continue
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((first, stop))
    return tuple(ranges)
