"""Work counters against counting the mask cell by cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.layout import PackedLayout, pack_groups, pack_sequences
from ratoon.planner import attended_pairs, useful_flops
from ratoon.planner.flops import layers_by_window, pairs_of_prefix
from ratoon.types import ModelShape, Prompt, Response, RolloutGroup

SHAPE = ModelShape(
    num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=101, intermediate_size=24
)
windows = st.sampled_from([None, 1, 2, 3, 7, 50])


def count_cells(layout: PackedLayout, window: int | None) -> int:
    count = 0
    for query in range(layout.num_rows):
        for key in range(query + 1):
            distance = layout.positions_T[query] - layout.positions_T[key]
            count += query < layout.expiry_T[key] and (window is None or distance < window)
    return count


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6), windows)
def test_attended_pairs_are_the_cells_of_the_mask(sequences: list[list[int]], window: int | None):
    layout = pack_sequences(sequences)
    assert attended_pairs(layout.positions_T, window) == count_cells(layout, window)


@given(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=4), windows)
def test_group_pairs_in_closed_form(P: int, lengths: list[int], window: int | None):
    group = RolloutGroup(Prompt("p", np.full(P, 1)), tuple(Response(np.full(R, 2)) for R in lengths))
    closed = int(pairs_of_prefix(P, window))
    closed += sum(int(pairs_of_prefix(P + R, window) - pairs_of_prefix(P, window)) for R in lengths)
    assert closed == count_cells(pack_groups([group]), window)


def test_group_pairs_without_window_by_formula():
    P, R = 5, 3
    assert int(pairs_of_prefix(P + R, None) - pairs_of_prefix(P, None)) == R * P + R * (R + 1) // 2


def test_useful_flops_by_hand():
    layout = pack_groups(
        [
            RolloutGroup(
                Prompt("p", np.full(5, 1)),
                (Response(np.full(3, 2)), Response(np.empty(0, np.int64)), Response(np.full(2, 2))),
            )
        ]
    )
    parameters = 3 * (16 * 8 * 2 * (4 + 2) + 3 * 16 * 24)
    pairs = 15 + (15 + 6) + (10 + 3)
    expected = 6 * parameters * 10 + 6 * 16 * 101 * 5 + 3.5 * 4 * 4 * 8 * pairs * 3
    assert useful_flops(SHAPE, layout) == pytest.approx(expected, rel=1e-12)


def test_windows_lower_the_count_only_in_their_layers():
    layout = pack_groups([RolloutGroup(Prompt("p", np.full(5, 1)), (Response(np.full(3, 2)),))])
    hybrid = ModelShape(
        num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=101, intermediate_size=24,
        windows=(2, None, 2),
    )  # fmt: skip
    assert layers_by_window(hybrid) == {2: 2, None: 1}
    missing = 2 * (36 - (1 + 7 * 2))
    difference = useful_flops(SHAPE, layout) - useful_flops(hybrid, layout)
    assert difference == pytest.approx(3.5 * 4 * 4 * 8 * missing, rel=1e-9)


def test_windows_of_another_number_of_layers_are_refused():
    shape = ModelShape(
        num_layers=3, hidden_size=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1, intermediate_size=1,
        windows=(2,),
    )  # fmt: skip
    with pytest.raises(ValueError, match="one entry for each of 3 layers, got 1"):
        layers_by_window(shape)


def test_long_contexts_do_not_overflow():
    million = np.arange(1_000_000, dtype=np.int32)
    assert attended_pairs(million) == 1_000_000 * 1_000_001 // 2


def test_frozen_weights_have_no_gradient_of_their_own():
    layout = pack_groups(
        [RolloutGroup(Prompt("p", np.ones(5, int)), (Response(np.ones(3, int)), Response(np.ones(4, int))))]
    )
    whole = useful_flops(SHAPE, layout)
    matmuls = 6 * (SHAPE.active_parameters * layout.num_rows + SHAPE.hidden_size * SHAPE.vocab_size * layout.num_scored)
    assert useful_flops(SHAPE, layout, trains_weights=False) == pytest.approx(whole - matmuls / 3, rel=1e-12)
