"""Counter-based draws against integer arithmetic, and the inverse of the cumulative distribution against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.rollout.draws import response_key, sample_tokens, uniform_draws

MASK = 2**64 - 1


def splitmix64(seed: int, index: int) -> int:
    """Output `index` of the reference SplitMix64, by unbounded integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_splitmix64_is_the_published_one():
    """The first outputs for seed 1234567, as published with the generator."""
    assert [splitmix64(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**31)), min_size=1, max_size=9))
def test_uniforms_are_the_top_bits_of_the_stream(pairs: list[tuple[int, int]]):
    keys, positions = zip(*pairs, strict=True)
    drawn = uniform_draws(np.array(keys, np.uint64), np.array(positions, np.int64))
    expected = [((splitmix64(key, position) >> 16) + 0.5) / 2**48 for key, position in pairs]
    assert drawn.tolist() == expected
    assert all(0 < number < 1 for number in expected)


def test_uniforms_are_uniform_along_and_across_streams():
    keys = np.array([response_key(0, step, "p", index) for step in range(40) for index in range(50)], np.uint64)
    for positions in (np.zeros(2_000, np.int64), np.full(2_000, 7)):
        counts = np.histogram(uniform_draws(keys, positions), bins=20, range=(0, 1))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 19 + 4 * 38**0.5
    along = uniform_draws(np.full(2_000, keys[0]), np.arange(2_000))
    assert ((np.histogram(along, bins=20, range=(0, 1))[0] - 100) ** 2 / 100).sum() < 19 + 4 * 38**0.5
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.08


def test_keys_differ_in_each_of_their_parts_and_do_not_change_between_runs():
    keys = [
        response_key(0, 0, "a", 0),
        response_key(1, 0, "a", 0),
        response_key(0, 1, "a", 0),
        response_key(0, 0, "b", 0),
        response_key(0, 0, "a", 1),
        response_key(0, 0, 1, 0),
        response_key(0, 0, "1", 0),
        response_key(0, 0, "a', 0", 0),
    ]
    assert len(set(keys)) == len(keys)
    # A run that resumes must draw what it would have drawn: this number is for ever.
    assert keys[0] == 8486565526693381467


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0.05, 5.0))
def test_tokens_invert_the_cumulative_distribution(vocab_size: int, seed: int, temperature: float):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (6, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, rng.integers(vocab_size)] = 1.0
    uniform = rng.random(6)
    tokens, logprobs = sample_tokens(
        torch.from_numpy(logits), torch.full((6,), temperature, dtype=torch.float64), torch.from_numpy(uniform)
    )
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        assert probs[row, token] > 0
        assert probs[row, :token].sum() <= uniform[row] + 1e-12
        assert probs[row, : token + 1].sum() >= uniform[row] - 1e-12
        assert logprob == pytest.approx(np.log(probs[row, token]), abs=2e-6)


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    uniform = torch.tensor([0.5 / 2**48, 1 - 0.5 / 2**48], dtype=torch.float64)
    tokens, _ = sample_tokens(logits, torch.ones(2, dtype=torch.float64), uniform)
    assert tokens.tolist() == [1, 3]


def test_a_large_vocabulary_does_not_bias_logprobs():
    """float32 sums over 150,000 tokens are off by more than 1e-6."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 150_001, generator=generator)
    tokens, logprobs = sample_tokens(
        logits, torch.full((4,), 0.7, dtype=torch.float64), torch.rand(4, generator=generator).double()
    )
    exact = torch.log_softmax(logits.double() / 0.7, dim=-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs.double() - exact).abs().max() < 6e-7


def test_greedy_takes_the_lowest_of_equals_and_shows_what_is_not_finite():
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, float("nan"), 1.0]])
    temperature = torch.zeros(2, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, temperature, torch.full((2,), 0.5, dtype=torch.float64))
    assert tokens[0] == 1 and logprobs[0] == 0
    assert not torch.isfinite(logprobs[1])
    _, sampled = sample_tokens(logits, temperature + 1, torch.full((2,), 0.5, dtype=torch.float64))
    assert not torch.isfinite(sampled[1])
