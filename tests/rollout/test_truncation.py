"""Top-k, top-p and min-p against a ranking written out in NumPy, equals included."""

# Shape letters: B responses of one forward pass, V vocabulary.

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratoon.rollout import truncation as module
from ratoon.rollout.draws import sample_tokens
from ratoon.rollout.truncation import Truncation, sample_kept_tokens
from ratoon.types import SamplingParams


def oracle_kept(logits_V: NDArray[np.float32], truncation: Truncation) -> set[int]:
    """Rank by logit and then by id, and walk down the ranks."""
    scaled_V = logits_V.astype(np.float64) / truncation.temperature
    weights_V = np.exp(scaled_V - scaled_V.max())
    ranking = sorted(range(logits_V.size), key=lambda token: (-logits_V[token], token))
    if truncation.top_k:
        ranking = ranking[: truncation.top_k]
    total = math.fsum(weights_V[token] for token in ranking)
    kept: set[int] = set()
    for rank, token in enumerate(ranking):
        mass_before = math.fsum(weights_V[earlier] for earlier in ranking[:rank])
        if truncation.top_p < 1 and mass_before >= truncation.top_p * total:
            break
        if rank and (weights_V[token] == 0 or weights_V[token] < truncation.min_p):
            break
        kept.add(token)
    return kept


def draw(logits_BV: NDArray[np.float32], truncation: Truncation, seed: int = 0) -> module.KeptDraws:
    uniform_B = torch.from_numpy(np.random.default_rng(seed).random(logits_BV.shape[0]))
    return sample_kept_tokens(torch.from_numpy(logits_BV), truncation, uniform_B)


def assert_drawn_as_kept(logits_BV: NDArray[np.float32], truncation: Truncation, seed: int) -> None:
    """The set is the oracle's; token and log-prob are the renormalised distribution's inverse and its value."""
    uniform_B = np.random.default_rng(seed).random(logits_BV.shape[0])
    drawn = draw(logits_BV, truncation, seed)
    assert len(drawn.kept) == logits_BV.shape[0]
    for row, kept in enumerate(drawn.kept):
        assert kept.dtype == np.int32
        assert kept.tolist() == sorted(oracle_kept(logits_BV[row], truncation))
        scaled = logits_BV[row, kept].astype(np.float64) / truncation.temperature
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        place = kept.tolist().index(int(drawn.token_B[row]))
        assert probs[:place].sum() <= uniform_B[row] + 1e-12
        assert probs[: place + 1].sum() >= uniform_B[row] - 1e-12
        assert drawn.logprob_B[row] == pytest.approx(np.log(probs[place]), abs=2e-6)


# Few distinct values: equals everywhere. Only equals alone can add up to exactly a share of the total, and their sums
# are exact, so every way of adding up decides alike.
exact_logits = st.lists(st.lists(st.integers(-6, 0), min_size=1, max_size=12), min_size=1, max_size=4)


@given(
    exact_logits,
    st.integers(0, 14),
    st.sampled_from([1.0, 0.999, 0.75, 0.5, 0.3, 0.25, 1e-9]),
    st.sampled_from([0.0, 1e-3, 0.2, 0.5, 0.99]),
    st.sampled_from([(1, 0, 1), (2, 1, 5), (3, 2, 4), (128, 64, 4096)]),
)
def test_kept_sets_are_the_rankings_prefix(
    powers: list[list[int]], top_k: int, top_p: float, min_p: float, limits: tuple[int, int, int]
):
    """Many equals, at the borders too; ranks are looked at a few at a time, or all at once."""
    width = max(map(len, powers))
    logits_BV = np.full((len(powers), width), -np.inf, np.float32)
    for row, values in enumerate(powers):
        logits_BV[row, : len(values)] = values
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in zip(("FIRST_RANKS", "_MORE_RANKS", "_WIDE"), limits, strict=True):
            patch.setattr(module, name, limit)
        assert_drawn_as_kept(logits_BV, Truncation(0.7, top_k, top_p, min_p), seed=len(powers))


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.floats(0.05, 5.0),
    st.integers(0, 320),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.9),
    st.sampled_from(["normal", "rounded", "masked"]),
)
def test_any_distribution(
    vocab_size: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, kind: str
):
    rng = np.random.default_rng(seed)
    logits_BV = rng.normal(0, 3, (5, vocab_size)).astype(np.float32)
    if kind == "rounded":  # as a bf16 head gives them: equals everywhere
        logits_BV = np.round(logits_BV)
    if kind == "masked":
        logits_BV[rng.random(logits_BV.shape) < 0.5] = -np.inf
        logits_BV[:, rng.integers(vocab_size)] = 1.0
    assert_drawn_as_kept(logits_BV, Truncation(temperature, top_k, top_p, min_p), seed)


def test_equals_at_the_border_go_by_token_id():
    logits_BV = np.array([[1, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    kept = {
        (2, 1.0, 0.0): ([1, 2], [0, 1]),
        (4, 1.0, 0.0): ([0, 1, 2, 4], [0, 1, 2, 3]),
        # Half of six equals is exactly three; the least more is four.
        (0, 0.5, 0.0): ([1, 2], [0, 1, 2]),
        (0, 0.5 + 1e-9, 0.0): ([1, 2], [0, 1, 2, 3]),
        # Top-p of what top-k leaves: half of four equals.
        (4, 0.5, 0.0): ([1, 2], [0, 1]),
        # Min-p keeps all equals, or none.
        (0, 1.0, 0.99): ([1, 2, 4], [0, 1, 2, 3, 4, 5]),
        (5, 1.0, math.exp(-1) - 1e-9): ([0, 1, 2, 4, 5], [0, 1, 2, 3, 4]),
    }
    for (top_k, top_p, min_p), expected in kept.items():
        drawn = draw(logits_BV, Truncation(1.0, top_k, top_p, min_p))
        assert tuple(ids.tolist() for ids in drawn.kept) == expected, (top_k, top_p, min_p)


def test_positive_and_negative_zero_are_equals():
    logits_BV = np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32)
    assert draw(logits_BV, Truncation(1.0, 2, 1.0, 0.0)).kept[0].tolist() == [0, 1]


def test_temperature_comes_before_the_filters():
    """Heat flattens: the same 90 % take more tokens, and more are half as likely as the likeliest."""
    logits_BV = np.log(np.array([[0.6, 0.3, 0.06, 0.04]], np.float32))
    for temperature, by_p, by_min in ((0.5, [0, 1], [0]), (1.0, [0, 1, 2], [0, 1]), (4.0, [0, 1, 2, 3], [0, 1, 2, 3])):
        assert draw(logits_BV, Truncation(temperature, 0, 0.91, 0.0)).kept[0].tolist() == by_p
        assert draw(logits_BV, Truncation(temperature, 0, 1.0, 0.49)).kept[0].tolist() == by_min


def test_nothing_left_out_draws_what_plain_sampling_draws():
    rng = np.random.default_rng(0)
    logits_BV = torch.from_numpy(rng.normal(0, 3, (200, 77)).astype(np.float32))
    uniform_B = torch.from_numpy(rng.random(200))
    plain, logprobs = sample_tokens(logits_BV, torch.full((200,), 0.7, dtype=torch.float64), uniform_B)
    drawn = sample_kept_tokens(logits_BV, Truncation(0.7, 77, 1.0, 0.0), uniform_B)
    assert torch.equal(drawn.token_B, plain)
    torch.testing.assert_close(drawn.logprob_B, logprobs, rtol=0, atol=1e-6)
    assert all(kept.size == 77 for kept in drawn.kept)


def test_no_row_depends_on_its_company():
    """Flat rows beside peaked ones are ranked further, and change nothing for the others."""
    rng = np.random.default_rng(1)
    logits_BV = (rng.normal(0, 1, (24, 2000)) * rng.choice([0.01, 1, 6], (24, 1))).astype(np.float32)
    uniform_B = torch.from_numpy(rng.random(24))
    truncation = Truncation(0.7, 0, 0.9, 0.0)
    together = sample_kept_tokens(torch.from_numpy(logits_BV), truncation, uniform_B)
    sizes = {kept.size for kept in together.kept}
    assert min(sizes) < 100 and max(sizes) > 1500
    for row in range(24):
        alone = sample_kept_tokens(torch.from_numpy(logits_BV[row : row + 1]), truncation, uniform_B[row : row + 1])
        assert alone.token_B[0] == together.token_B[row]
        assert alone.logprob_B[0] == together.logprob_B[row]
        assert alone.kept[0].tolist() == together.kept[row].tolist()


def test_draws_follow_the_renormalised_distribution():
    """20,000 draws, by a chi-squared statistic; nothing outside the set is ever drawn."""
    logits_V = np.random.default_rng(2).normal(0, 1.5, 30).astype(np.float32)
    truncation = Truncation(0.9, 12, 0.9, 0.02)
    drawn = draw(np.tile(logits_V, (20_000, 1)), truncation)
    kept = drawn.kept[0]
    probs = np.exp(logits_V[kept].astype(np.float64) / 0.9)
    expected = 20_000 * probs / probs.sum()
    counts_V = np.bincount(drawn.token_B.numpy(), minlength=30)
    counts = counts_V[kept]
    assert counts.sum() == 20_000
    freedom = kept.size - 1
    assert freedom > 4
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5


def test_logits_that_are_not_finite_show():
    logits_BV = np.array([[0, np.nan, 1], [0, np.inf, 1], [-np.inf] * 3, [0, 1, 2]], np.float32)
    for truncation in (Truncation(1.0, 2, 1.0, 0.0), Truncation(1.0, 0, 0.9, 0.0), Truncation(1.0, 0, 1.0, 0.1)):
        assert torch.isfinite(draw(logits_BV, truncation).logprob_B).tolist() == [False, False, False, True]


def test_only_what_leaves_tokens_out_is_truncation():
    assert Truncation.of(SamplingParams()) is None
    assert Truncation.of(SamplingParams(temperature=0.0, top_k=5)) is None
    assert Truncation.of(SamplingParams(temperature=0.5, min_p=0.1)) == Truncation(0.5, 0, 1.0, 0.1)
