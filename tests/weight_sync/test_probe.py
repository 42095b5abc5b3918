"""The probe's arithmetic, and what it says of engines that serve other weights."""

import numpy as np
import pytest
from tests.rollout.tiny import VOCAB, byte_tokenizer

from ratoon.weight_sync import ProbeGap, ProbeScores, WeightProbe, WeightSyncError, probe_tokens

NOISE = np.array([0.01, -0.02, 0.0, 0.03])


def scores(version: int, level: float) -> ProbeScores:
    return ProbeScores(version, np.linspace(-9.0, -1.0, 4) + level)


def off_by(of: ProbeScores, difference: np.ndarray) -> ProbeScores:
    return ProbeScores(of.version, of.logprobs_M + difference)


def test_the_gap_is_of_absolute_differences():
    trainer = scores(3, 0.0)
    gap = ProbeGap.between(off_by(trainer, NOISE), trainer)
    assert gap.version == 3
    assert gap.mean_abs == pytest.approx(0.015) and gap.max_abs == pytest.approx(0.03)


def test_rounding_passes_and_a_jump_does_not():
    """TRL#5312: after waking from level 2 an engine served stale weights, and the log-prob gap went from 0.015 to
    0.201; only whoever looked at a metric could see it."""
    probe = WeightProbe("vLLM", max_mean_abs=0.05, limit_key="rollout.vllm.max_probe_gap")
    for version in range(3):
        trainer = scores(version, version)
        assert probe.check(off_by(trainer, NOISE), trainer).mean_abs < 0.02
    with pytest.raises(WeightSyncError, match=r"version 3 .* vLLM scores 0\.201 nats .*max_probe_gap=0\.05") as raised:
        probe.check(off_by(scores(3, 3.0), np.full(4, 0.201)), scores(3, 3.0))
    assert "some weights did not arrive" in str(raised.value)


def test_an_engine_that_stayed_behind_is_recognised():
    probe = WeightProbe("vLLM", max_mean_abs=0.05, limit_key="rollout.vllm.max_probe_gap")
    probe.check(scores(1, 0.0), scores(1, 0.0))
    with pytest.raises(WeightSyncError, match=r"away from version 1, so the engine still serves those weights"):
        probe.check(off_by(scores(2, 0.0), NOISE), scores(2, 0.7))


@pytest.mark.parametrize(
    ("engine", "trainer", "cause"),
    [(np.nan, 0.0, "weights arrived broken"), (0.0, np.nan, "the last update broke the policy")],
)
def test_numbers_that_are_none_stop_the_run(engine: float, trainer: float, cause: str):
    probe = WeightProbe("vLLM", max_mean_abs=0.05, limit_key="rollout.vllm.max_probe_gap")
    with pytest.raises(WeightSyncError, match=cause):
        probe.check(scores(1, engine), scores(1, trainer))


def test_the_tokens_are_fixed_and_in_the_vocabulary():
    tokens = probe_tokens(byte_tokenizer(), VOCAB)
    np.testing.assert_array_equal(tokens, probe_tokens(byte_tokenizer(), VOCAB))
    assert byte_tokenizer().decode(tokens[:9]) == "Question:" and tokens.size == 64


def test_a_vocabulary_without_the_text_gets_arbitrary_tokens():
    tokens = probe_tokens(byte_tokenizer(), 40)
    assert tokens.min() >= 0 and tokens.max() < 40 and tokens.size == 16
