"""What a layout must mean, worked out token by token from the sequences and the attention rule alone."""

from collections.abc import Sequence

from ratoon.layout import PackedLayout
from ratoon.types import RolloutGroup


def attended_rows(layout: PackedLayout, query: int) -> list[int]:
    """The keys of one row by the rule: k <= q < expiry[k]."""
    return [key for key in range(query + 1) if query < layout.expiry_T[key]]


def full_sequences(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    """Prompt and response as one list, for every response of every group."""
    return [
        [*group.prompt.token_ids.tolist(), *response.token_ids.tolist()]
        for group in groups
        for response in group.responses
    ]


def check_layout(layout: PackedLayout, sequences: Sequence[Sequence[int]], first_scored: Sequence[int]) -> None:
    """Each sequence is scored from its `first_scored` token on, every token from exactly its own prefix.

    Uses only token ids, positions and expiry: neither segments nor the layout's own walk over them.
    """
    scored = [
        (index, position)
        for index, sequence in enumerate(sequences)
        for position in range(first_scored[index], len(sequence))
    ]
    assert layout.num_scored == len(scored)
    assert layout.num_sequences == len(sequences)
    for m, (index, position) in enumerate(scored):
        assert layout.sequence_of_M[m] == index
        assert layout.target_M[m] == sequences[index][position]
        rows = attended_rows(layout, int(layout.predictor_row_M[m]))
        assert layout.token_ids_T[rows].tolist() == list(sequences[index][:position])
        assert layout.positions_T[rows].tolist() == list(range(position))
    # Rows that score nothing, too, attend one whole path from position 0 to themselves.
    for row in range(layout.num_rows):
        rows = attended_rows(layout, row)
        assert rows[-1] == row
        assert layout.positions_T[rows].tolist() == list(range(len(rows)))
    for index, sequence in enumerate(sequences):
        rows = layout.sequence_rows(index)
        assert layout.token_ids_T[rows].tolist() == list(sequence)
        assert layout.positions_T[rows].tolist() == list(range(len(sequence)))
    assert layout.sequence_lengths_N.tolist() == [len(sequence) for sequence in sequences]
    assert layout.num_logical_tokens == sum(len(sequence) for sequence in sequences)
    if layout.num_rows:
        assert layout.dedup_ratio == layout.num_logical_tokens / layout.num_rows
