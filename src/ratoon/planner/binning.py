"""Items into bins of limited room: the fewest bins, or a given number of evenly filled ones."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

# Bins tried for one item before `spread` gives up; keeps it near-linear when room is short everywhere.
_MAX_TRIES = 32


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Item indices by bin: largest first, each into the fullest bin with room (best-fit decreasing).

    Uses at most 11/9 of the fewest possible bins, plus 6/9. Every size must be <= capacity.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in _descending(sizes):
        size = sizes[item]
        fullest = bisect_left(rooms, (size, -1))
        if fullest < len(rooms):
            room, chosen = rooms.pop(fullest)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        assert size <= room, f"an item of size {size} cannot fit a bin of {capacity}"
        bins[chosen].append(item)
        insort(rooms, (room - size, chosen))
    return bins


def spread(sizes: Sequence[int], weights: Sequence[float], capacity: int, num_bins: int) -> list[list[int]] | None:
    """Item indices by bin: heaviest first, each into the lightest bin with room (LPT).

    None where an item found no room; `best_fit` may still find a way.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    rooms = [capacity] * num_bins
    lightest = [(0.0, index) for index in range(num_bins)]
    for item in _descending(weights):
        passed_over: list[tuple[float, int]] = []
        while lightest and rooms[lightest[0][1]] < sizes[item] and len(passed_over) < _MAX_TRIES:
            passed_over.append(heapq.heappop(lightest))
        if not lightest or rooms[lightest[0][1]] < sizes[item]:
            return None
        weight, chosen = lightest[0]
        bins[chosen].append(item)
        rooms[chosen] -= sizes[item]
        heapq.heapreplace(lightest, (weight + weights[item], chosen))
        for entry in passed_over:
            heapq.heappush(lightest, entry)
    return bins


def _descending(values: Sequence[float]) -> list[int]:
    """Indices by falling value; equal values keep their order."""
    return sorted(range(len(values)), key=lambda index: -values[index])
