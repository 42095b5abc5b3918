"""Rows that make a layout longer and change nothing."""

# Shape letters: T rows, S segments.

import numpy as np

from ratoon.layout.packed_layout import PackedLayout, build_layout

_PAD_TOKEN_ID = 0
"""In every vocabulary. No other row reads it and nothing is scored from it."""


def pad_rows(layout: PackedLayout, num_rows: int) -> PackedLayout:
    """The layout with rows behind its own, each a root that expires at once, until there are `num_rows`.

    Scored tokens and sequences are the same, and so are the rows that were there. Each row of padding is a segment,
    so that it reads nothing but itself: the way to a multiple of something small, not to a multiple of thousands.
    Raises ValueError where the layout has more rows.
    """
    missing = num_rows - layout.num_rows
    if missing < 0:
        raise ValueError(
            f"a layout of {layout.num_rows:,} rows cannot be padded to {num_rows:,}; ask for at least its own"
        )
    if missing == 0:
        return layout
    return build_layout(
        token_ids_T=np.append(layout.token_ids_T, np.full(missing, _PAD_TOKEN_ID)),
        segment_lengths=np.append(np.diff(layout.segment_offsets), np.ones(missing, np.int64)),
        segment_parent=np.append(layout.segment_parent, np.full(missing, -1)),
        predictor_row_M=layout.predictor_row_M,
        target_M=layout.target_M,
        sequence_of_M=layout.sequence_of_M,
        sequence_segment_N=layout.sequence_segment_N,
    )
