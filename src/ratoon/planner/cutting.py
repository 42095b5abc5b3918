"""Groups to parts: whole where they fit one microbatch and one rank's share, cut by responses where they do not."""

# Shape letters: P prompt tokens, R response tokens, G groups, Q responses of all groups.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ratoon.planner.binning import best_fit, spread
from ratoon.planner.cost import CostModel
from ratoon.planner.group_shape import GroupShape, ShapeTable
from ratoon.types.errors import UserError

_HALVINGS = 40
"""Of an interval of seconds: to its 10^-12th."""


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

    num_prompt_rows: int
    """P: of the rows, those that parts of one group have in common."""

    prompt_s: float
    """Of the seconds, those that parts of one group have in common."""


Bundle = tuple[Part, ...]
"""What goes to one rank together. Several parts are of one group, and each has a microbatch of its own."""


def cut_groups(
    shapes: Sequence[GroupShape], table: ShapeTable, *, max_rows: int, cost: CostModel, max_work_s: float = math.inf
) -> list[Part]:
    """Every response of every group in exactly one part of at most `max_rows` rows; in order of groups.

    max_work_s: parts cost no more where cutting helps: a part has at least one response, and each its prompt.
    A group without responses has no part. Responses without tokens travel with the group's first part.
    """
    parts: list[Part] = []
    for group in _costed(shapes, table, max_rows, cost):
        whole = group.whole
        if whole.num_rows <= max_rows and group.may_stay_whole(max_work_s):
            parts.append(whole)
        else:
            parts.extend(group.cut(whole.response_indices, max_rows, group.fewest_by_work(max_work_s)))
    return parts


def cut_bundles(
    shapes: Sequence[GroupShape], table: ShapeTable, *, max_rows: int, cost: CostModel, max_work_s: float = math.inf
) -> list[Bundle]:
    """As `cut_groups`, for ranks that keep a prompt from one microbatch to the next: in bundles that each rank computes
    one prompt for, where that is cheaper than computing it in every part.

    max_work_s: of a bundle.
    """
    bundles: list[Bundle] = []
    for group in _costed(shapes, table, max_rows, cost):
        pieces = [group.whole]
        if not group.may_stay_whole(max_work_s):
            no_limit = sum(group.lengths) + group.whole.num_prompt_rows
            pieces = group.cut(group.whole.response_indices, no_limit, group.fewest_by_work(max_work_s))
        for piece in pieces:
            parts = [piece] if piece.num_rows <= max_rows else group.cut(piece.response_indices, max_rows, 1)
            if cost.saved_by_keeping_s(piece.prompt_s, len(parts)) > 0:
                bundles.append(tuple(parts))
            else:
                bundles.extend((part,) for part in parts)
    return bundles


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Those of one microbatch, which needs each group's prompt once: parts of a group become one. In order of groups'
    first parts."""
    by_group: dict[int, list[Part]] = {}
    for part in parts:
        by_group.setdefault(part.group_index, []).append(part)
    return [_merge(of_group) if len(of_group) > 1 else of_group[0] for of_group in by_group.values()]


def even_limit_s(table: ShapeTable, cost: CostModel, num_shares: int) -> float:
    """What each of `num_shares` has where parts cost no more than that: the least that is enough for all parts, their
    repeated prompts counted. More than an even share of the work, whose prompts are counted once.
    """
    if table.response_tokens_Q.size == 0:
        return 0.0
    response_s_Q = cost.response_s(table.prompt_tokens_G[table.group_of_Q], table.response_tokens_Q)
    prompt_s_G = np.where(table.group_sizes_G > 0, cost.prompt_s(table.prompt_tokens_G), 0.0)
    responses_s_G, costliest_s_G = np.zeros_like(prompt_s_G), np.zeros_like(prompt_s_G)
    np.add.at(responses_s_G, table.group_of_Q, response_s_Q)
    np.maximum.at(costliest_s_G, table.group_of_Q, response_s_Q)

    def share_s(limit_s: float) -> float:
        room_s_G = np.maximum(limit_s - prompt_s_G, costliest_s_G)
        is_cut_G = (prompt_s_G + responses_s_G > limit_s) & (room_s_G > 0)
        parts_G = np.ceil(np.divide(responses_s_G, room_s_G, out=np.ones_like(room_s_G), where=is_cut_G))
        return float((parts_G * prompt_s_G + responses_s_G).sum()) / num_shares

    # The more a part may cost, the fewer prompts are repeated: all limits above the least are enough.
    too_little_s, enough_s = 0.0, float((prompt_s_G + responses_s_G).sum())
    for _ in range(_HALVINGS):
        middle_s = (too_little_s + enough_s) / 2
        too_little_s, enough_s = (too_little_s, middle_s) if share_s(middle_s) <= middle_s else (middle_s, enough_s)
    return enough_s


def _merge(parts: Sequence[Part]) -> Part:
    """Of one group."""
    first, repeated = parts[0], len(parts) - 1
    return Part(
        first.group_index,
        tuple(sorted(response for part in parts for response in part.response_indices)),
        sum(part.num_rows for part in parts) - repeated * first.num_prompt_rows,
        math.fsum(part.work_s for part in parts) - repeated * first.prompt_s,
        first.num_prompt_rows,
        first.prompt_s,
    )


@dataclass(frozen=True, slots=True)
class _CostedGroup:
    """A group that has responses, and their predicted seconds."""

    whole: Part
    lengths: Sequence[int]
    response_s: Sequence[float]

    def may_stay_whole(self, max_work_s: float) -> bool:
        return self.whole.work_s <= max_work_s or len(self.lengths) == 1

    def fewest_by_work(self, max_work_s: float) -> int:
        """Parts of at most `max_work_s` that the responses could fill, each with its prompt."""
        room_s = max(max_work_s - self.whole.prompt_s, *self.response_s)
        if room_s == math.inf or room_s <= 0:  # 0: responses that cost nothing gain nothing from being apart
            return 1
        return math.ceil(math.fsum(self.response_s) / room_s * (1 - 1e-9))

    def cut(self, responses: Sequence[int], max_rows: int, fewest: int) -> list[Part]:
        """The responses in parts of at most `max_rows`, at least `fewest` where there are so many with tokens."""
        P = self.whole.num_prompt_rows
        lengths = [self.lengths[response] for response in responses]
        response_s = [self.response_s[response] for response in responses]
        return [
            Part(
                self.whole.group_index,
                tuple(responses[item] for item in items),
                P + sum(lengths[item] for item in items),
                self.whole.prompt_s + math.fsum(response_s[item] for item in items),
                P,
                self.whole.prompt_s,
            )
            for items in _cut_responses(lengths, response_s, max_rows - P, fewest)
        ]


def _costed(shapes: Sequence[GroupShape], table: ShapeTable, max_rows: int, cost: CostModel) -> Iterator[_CostedGroup]:
    """Groups that have responses, in order. Raises UserError where one response with its prompt is over `max_rows`."""
    _check_each_response_fits(shapes, table, max_rows)
    prompt_s_G = cost.prompt_s(table.prompt_tokens_G)
    response_s_Q = cost.response_s(table.prompt_tokens_G[table.group_of_Q], table.response_tokens_Q)
    work_G = prompt_s_G.copy()
    np.add.at(work_G, table.group_of_Q, response_s_Q)
    first_G = np.cumsum(table.group_sizes_G) - table.group_sizes_G
    columns = zip(table.rows_G.tolist(), work_G.tolist(), prompt_s_G.tolist(), first_G.tolist(), strict=True)
    for index, (rows, work_s, prompt_s, first) in enumerate(columns):
        P, lengths = shapes[index].num_prompt_tokens, shapes[index].response_lengths
        if lengths:
            whole = Part(index, tuple(range(len(lengths))), rows, work_s, P, prompt_s)
            yield _CostedGroup(whole, lengths, response_s_Q[first : first + len(lengths)].tolist())


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
