"""Predicted seconds: linear in the work, equal to the useful FLOPs over the speed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.layout import pack_groups
from ratoon.planner import CostModel, WindowCost, useful_flops
from ratoon.types import ModelShape, Prompt, Response, RolloutGroup


def model_shape(windows: tuple[int | None, ...] = ()) -> ModelShape:
    return ModelShape(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=1000,
        intermediate_size=96, num_experts=8, experts_per_token=2, windows=windows,
    )  # fmt: skip


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 40), max_size=5),
    st.sampled_from([(), (8, None, 8, 3), (1, 1, 1, 1)]),
)
def test_predicted_seconds_are_useful_flops_over_speed(P: int, lengths: list[int], windows: tuple[int | None, ...]):
    shape = model_shape(windows)
    group = RolloutGroup(Prompt("p", np.full(P, 1)), tuple(Response(np.full(R, 2)) for R in lengths))
    cost = CostModel.from_shape(shape, flops_per_s=1e9)
    assert cost.part_s(P, lengths) == pytest.approx(useful_flops(shape, pack_groups([group])) / 1e9, rel=1e-9)


def test_defaults_are_a_dense_1_7b_decoder():
    """The literal defaults agree with the sizes that the docstring names, to their two digits."""
    shape = ModelShape(
        num_layers=28, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151_936,
        intermediate_size=6144, tied_embeddings=True,
    )  # fmt: skip
    derived, default = CostModel.from_shape(shape, flops_per_s=4e14), CostModel()
    assert default.seconds_per_row == pytest.approx(derived.seconds_per_row, rel=0.03)
    assert default.seconds_per_scored_token == pytest.approx(derived.seconds_per_scored_token, rel=0.03)
    assert default.attention[0].seconds_per_pair == pytest.approx(derived.attention[0].seconds_per_pair, rel=0.03)


def test_each_term_by_itself():
    zero: dict[str, float] = {"seconds_per_row": 0.0, "seconds_per_scored_token": 0.0, "seconds_per_microbatch": 0.0}
    no_attention = (WindowCost(None, 0.0),)
    lengths = [3, 0, 2]
    assert CostModel(**{**zero, "seconds_per_row": 1.0}, attention=no_attention).part_s(5, lengths) == 10
    assert CostModel(**{**zero, "seconds_per_scored_token": 1.0}, attention=no_attention).part_s(5, lengths) == 5
    assert CostModel(**{**zero, "seconds_per_microbatch": 1.0}, attention=no_attention).part_s(5, lengths) == 0
    assert CostModel(**zero, attention=(WindowCost(None, 1.0),)).part_s(5, lengths) == 15 + 21 + 13


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_nonsense_costs_are_refused(bad: float):
    with pytest.raises(ValueError, match="finite and not negative"):
        CostModel(seconds_per_row=bad)
    with pytest.raises(ValueError, match="finite and not negative"):
        CostModel(attention=(WindowCost(None, bad),))
    with pytest.raises(ValueError, match="flops_per_s must be finite and positive"):
        CostModel.from_shape(model_shape(), flops_per_s=bad)
