"""The tile map against the rule itself, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.attention.tiles import TileState, build_tile_map
from ratoon.layout import PackedLayout, pack_sequences


@st.composite
def forests(draw: st.DrawFn) -> PackedLayout:
    """Few token values, so that sequences share prefixes of every depth."""
    sequence = st.lists(st.integers(0, 1), min_size=1, max_size=24)
    return pack_sequences(draw(st.lists(sequence, min_size=1, max_size=8)))


def reads(layout: PackedLayout, window: int | None) -> np.ndarray:
    """[T, T] bool: row reads key."""
    row, key = np.ogrid[: layout.num_rows, : layout.num_rows]
    mask = (key <= row) & (row < layout.expiry_T[None])
    if window is not None:
        mask &= layout.positions_T[:, None] - layout.positions_T[None] < window
    return mask


@given(forests(), st.sampled_from([None, 1, 3, 7]), st.sampled_from([1, 4, 5]), st.sampled_from([1, 3, 8]))
def test_states_are_what_the_rule_says(layout: PackedLayout, window: int | None, row_tile: int, key_tile: int):
    mask = reads(layout, window)
    state_RK = build_tile_map(layout, window, row_tile=row_tile, key_tile=key_tile).state_RK
    assert state_RK.shape == (-(-layout.num_rows // row_tile), -(-layout.num_rows // key_tile))
    for (r, k), state in np.ndenumerate(state_RK):
        tile = mask[r * row_tile : (r + 1) * row_tile, k * key_tile : (k + 1) * key_tile]
        if tile.all() and tile.shape == (row_tile, key_tile):
            assert state == TileState.FULL
        elif tile.any():
            assert state == TileState.PARTIAL
        else:
            assert state != TileState.FULL
            assert state == TileState.UNREAD or row_tile > 1 or key_tile > 1, "single pairs are exact"


@given(forests(), st.sampled_from([None, 4]), st.sampled_from([TileState.PARTIAL, TileState.FULL]))
def test_intervals_list_each_tile_once(layout: PackedLayout, window: int | None, state: TileState):
    tiles = build_tile_map(layout, window, row_tile=3, key_tile=2)
    for intervals, is_in in (
        (tiles.key_intervals_of_rows(state), tiles.state_RK == state),
        (tiles.row_intervals_of_keys(state), (tiles.state_RK == state).T),
    ):
        listed = np.zeros_like(is_in)
        for tile in range(len(is_in)):
            for i in range(intervals.offsets_B[tile], intervals.offsets_B[tile + 1]):
                assert not listed[tile, intervals.start_I[i] : intervals.end_I[i]].any()
                listed[tile, intervals.start_I[i] : intervals.end_I[i]] = True
        np.testing.assert_array_equal(listed, is_in)


@pytest.mark.parametrize("num_prompt_tokens", [1, 63, 64, 200])
def test_a_shared_prompt_costs_one_interval(num_prompt_tokens: int):
    """Without a window every tile of keys is read by one run of rows, whatever the number of responses."""
    prompt = list(range(num_prompt_tokens))
    layout = pack_sequences([[*prompt, 1000 + n, *range(40)] for n in range(6)])
    tiles = build_tile_map(layout, None, row_tile=16, key_tile=16)
    for key_tile, is_read in enumerate((tiles.state_RK != TileState.UNREAD).T):
        read = np.flatnonzero(is_read)
        assert np.array_equal(read, np.arange(read[0], read[-1] + 1)), key_tile


@given(forests(), st.sampled_from([None, 3]), st.sampled_from([1, 4, 5]), st.sampled_from([1, 3, 8]), st.data())
def test_rows_without_queries_read_their_own_tile(
    layout: PackedLayout, window: int | None, row_tile: int, key_tile: int, data: st.DataObject
):
    first = data.draw(st.integers(0, layout.num_rows), label="first_query_row")
    whole_RK = build_tile_map(layout, window, row_tile=row_tile, key_tile=key_tile).state_RK
    state_RK = build_tile_map(layout, window, row_tile=row_tile, key_tile=key_tile, first_query_row=first).state_RK
    for (r, k), state in np.ndenumerate(state_RK):
        last_row = min((r + 1) * row_tile, layout.num_rows) - 1
        has_queries = last_row >= first
        is_diagonal = r * row_tile < (k + 1) * key_tile and k * key_tile <= last_row
        assert state == (whole_RK[r, k] if has_queries or is_diagonal else TileState.UNREAD)
        assert has_queries or state_RK[r].any(), "a row that reads nothing"
