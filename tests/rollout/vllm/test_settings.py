"""Versions and settings that vLLM cannot serve exactly are refused before it is started. No vLLM is needed."""

from typing import Any

import pytest
from tests.rollout.tiny import byte_tokenizer, tiny_qwen3

from ratoon.rollout import RolloutConfig, build_engine
from ratoon.rollout.engines.vllm import versions
from ratoon.rollout.engines.vllm.refusals import check_settings
from ratoon.rollout.engines.vllm.versions import RUN, TESTED, Interfaces, interfaces_of, judge
from ratoon.types import UserError


@pytest.mark.parametrize("minor", RUN)
def test_a_version_that_was_run_passes_in_silence(minor: str):
    assert judge(f"{minor}.0") is None and judge(f"{minor}.7+cpu") is None


@pytest.mark.parametrize("version", ["0.23.0", "0.25.1", "0.33.0", "0.33.0rc1", "dev"])
def test_a_known_version_that_was_not_run_is_warned_of(version: str):
    assert TESTED in str(judge(version))


@pytest.mark.parametrize("version", ["0.19.1", "0.22.1", "0.34.0", "1.0"])
def test_an_unknown_version_is_refused(version: str):
    with pytest.raises(
        UserError, match=rf"0\.23 to below 0\.34, .* tested with {TESTED}; {version} is installed\. Inst"
    ):
        judge(version)


@pytest.mark.parametrize(
    ("version", "has_head_dtype", "names_versions"),
    [
        ("0.24.0", False, False),
        ("0.25.1", False, False),
        ("0.26.0", True, False),
        ("0.27.0rc2", True, True),
        ("0.32.0+cpu", True, True),
        ("dev", True, True),
    ],
)
def test_interfaces_follow_the_version(version: str, has_head_dtype: bool, names_versions: bool):
    assert interfaces_of(version) == Interfaces(has_head_dtype=has_head_dtype, names_versions=names_versions)


def test_without_vllm_the_recipe_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r'"vllm" needs the package vllm.*docs/engines\.md'):
        build_engine(RolloutConfig(engine="vllm"), tiny_qwen3(), byte_tokenizer())


@pytest.mark.parametrize(
    "settings", [{"sleep": 3}, {"gpu_memory_utilization": 1.0}, {"bucket_mib": 0}, {"head_dtype": "float16"}, {"x": 1}]
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"rollout|vllm|RolloutConfig"):
        RolloutConfig(engine="vllm", vllm=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"top_p": 0.9}, r"does not record which tokens top_p, top_k and min_p leave"),
        ({"top_k": 20}, r"does not record"),
        ({"temperature": 0.001}, r"does not draw at temperatures below 0\.01 \(got 0\.001\)"),
        ({"cache_tokens": 512}, r"rollout\.cache_tokens .* set rollout\.vllm\.cache_gib"),
        ({"vllm": {"sleep": 2}}, r"rollout\.vllm\.sleep = 2 gives back a GPU's memory, and the model is on the cpu"),
    ],
)
def test_what_vllm_cannot_do_exactly_is_refused(settings: dict[str, Any], complaint: str):
    """TRL#6789: log-probs renormalised over what top-p left, against the trainer's over the whole vocabulary."""
    with pytest.raises(UserError, match=complaint):
        check_settings(RolloutConfig(engine="vllm", **settings), tiny_qwen3())
