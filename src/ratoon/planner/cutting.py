"""Groups to parts: whole where they fit one microbatch and one rank's share, cut by responses where they do not."""

# Shape letters: P prompt tokens, R response tokens, G groups, Q responses of all groups.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratoon.planner.binning import best_fit, spread
from ratoon.planner.cost import CostModel
from ratoon.planner.group_shape import GroupShape, ShapeTable
from ratoon.types.errors import UserError


@dataclass(frozen=True, slots=True)
class Part:
    """Some responses of one group, and the prompt they need: what cannot be divided further below."""

    group_index: int
    response_indices: tuple[int, ...]
    """Ascending."""

    num_rows: int
    """P + ΣR."""

    work_s: float
    """Predicted seconds, without the cost of the microbatch around it."""


def cut_groups(
    shapes: Sequence[GroupShape], table: ShapeTable, *, max_rows: int, cost: CostModel, max_work_s: float = math.inf
) -> list[Part]:
    """Every response of every group in exactly one part of at most `max_rows` rows; in order of groups.

    max_work_s: parts cost no more where cutting helps: a part has at least one response, and each its prompt.
    A group without responses has no part. Responses without tokens travel with the group's first part.
    """
    _check_each_response_fits(shapes, table, max_rows)
    prompt_s_G = cost.prompt_s(table.prompt_tokens_G)
    response_s_Q = cost.response_s(table.prompt_tokens_G[table.group_of_Q], table.response_tokens_Q)
    work_G = prompt_s_G.copy()
    np.add.at(work_G, table.group_of_Q, response_s_Q)
    first_G = np.cumsum(table.group_sizes_G) - table.group_sizes_G
    parts: list[Part] = []
    for index, (rows, work) in enumerate(zip(table.rows_G.tolist(), work_G.tolist(), strict=True)):
        P, lengths = shapes[index].num_prompt_tokens, shapes[index].response_lengths
        if not lengths:
            continue
        if rows <= max_rows and (work <= max_work_s or len(lengths) == 1):
            parts.append(Part(index, tuple(range(len(lengths))), rows, work))
            continue
        response_s = response_s_Q[first_G[index] : first_G[index] + len(lengths)].tolist()
        prompt_s = float(prompt_s_G[index])
        room_s = max(max_work_s - prompt_s, *response_s)
        fewest = 1 if room_s == math.inf else math.ceil(math.fsum(response_s) / room_s * (1 - 1e-9))
        for chosen in _cut_responses(lengths, response_s, max_rows - P, fewest):
            part_s = prompt_s + math.fsum(response_s[response] for response in chosen)
            parts.append(Part(index, tuple(chosen), P + sum(lengths[response] for response in chosen), part_s))
    return parts


def _cut_responses(
    lengths: Sequence[int], response_s: Sequence[float], capacity: int, fewest_by_work: int
) -> list[list[int]]:
    """Response indices by part: few parts (as best-fit decreasing finds them), that cost alike where room allows."""
    tokens = [index for index, length in enumerate(lengths) if length > 0]
    sizes, weights = [lengths[index] for index in tokens], [response_s[index] for index in tokens]
    fewest = min(max(-(-sum(sizes) // capacity), fewest_by_work), len(tokens)) if tokens else 1
    bins = spread(sizes, weights, capacity, fewest)
    if bins is None:
        tight = best_fit(sizes, capacity)
        bins = spread(sizes, weights, capacity, max(len(tight), fewest)) or tight
    parts = [[tokens[item] for item in items] for items in bins]
    parts[0].extend(index for index, length in enumerate(lengths) if length == 0)
    return sorted(sorted(part) for part in parts if part)


def _check_each_response_fits(shapes: Sequence[GroupShape], table: ShapeTable, max_rows: int) -> None:
    rows_Q = table.prompt_tokens_G[table.group_of_Q] + table.response_tokens_Q
    if rows_Q.max(initial=0) <= max_rows:
        return
    too_long = int((rows_Q > max_rows).argmax())
    shape = shapes[int(table.group_of_Q[too_long])]
    P, R = shape.num_prompt_tokens, int(table.response_tokens_Q[too_long])
    raise UserError(
        f"prompt {shape.prompt_id!r} has {P:,} tokens and a response of {R:,}, together over "
        f"planner.max_rows_per_microbatch={max_rows:,}; raise the limit, lower rollout.max_response_tokens "
        "or filter the dataset"
    )
