"""Sampling parameters, model sizes, and the package's lazy names."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from ratoon import layout, types
from ratoon.types import ModelShape, SamplingParams, UserError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, r"rollout\.temperature must be finite and not negative, got -0\.1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"top_p": 0.0}, r"rollout\.top_p must lie in \(0, 1\], got 0\.0"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_p": float("nan")}, "got nan"),
        ({"top_k": -1}, r"rollout\.top_k must not be negative, got -1"),
        ({"min_p": -0.1}, r"rollout\.min_p must lie in \[0, 1\], got -0\.1"),
        ({"min_p": float("nan")}, "got nan"),
        ({"max_response_tokens": 0}, r"rollout\.max_response_tokens must be at least 1, got 0"),
        ({"stop": ("</s>", "")}, "empty string"),
    ],
)
def test_nonsense_sampling_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize("given", [{"top_p": 0.999}, {"top_k": 100_000}, {"min_p": 1e-9}])
def test_each_filter_alone_truncates(given: dict[str, Any]):
    assert SamplingParams(**given).is_truncated
    assert not SamplingParams(temperature=0.5, stop=("x",)).is_truncated


def test_greedy_sampling_is_legal():
    assert SamplingParams(temperature=0.0).temperature == 0.0


def test_parameters_of_a_published_model():
    """Qwen3-8B: 36 layers, 6.95 B parameters outside the embeddings (the model's card)."""
    shape = ModelShape(
        num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151_936,
        intermediate_size=12_288,
    )  # fmt: skip
    assert shape.active_parameters == pytest.approx(6.95e9, rel=0.002)


def test_active_parameters_of_a_mixture_of_experts():
    """Qwen3-30B-A3B: 3.3 B active, of which 0.6 B are embedding and head."""
    shape = ModelShape(
        num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151_936,
        intermediate_size=768, num_experts=128, experts_per_token=8,
    )  # fmt: skip
    assert shape.active_parameters == pytest.approx(3.3e9 - 2 * 151_936 * 2048, rel=0.03)


def test_user_error_is_a_value_error():
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize("package", [types, layout])
def test_public_names_resolve_to_themselves(package: Any):
    for name in package.__all__:
        public = getattr(package, name)
        assert getattr(importlib.import_module(public.__module__), name) is public
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_types_and_layout_import_no_torch():
    code = (
        "import sys; from ratoon import layout, types\n"
        "for package in (layout, types):\n"
        "    for name in package.__all__: getattr(package, name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
