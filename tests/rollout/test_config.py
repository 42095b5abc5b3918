"""Settings are checked when a recipe is read, without torch."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

import ratoon.rollout
from ratoon.rollout import RolloutConfig
from ratoon.types import SamplingParams


def test_sampling_params_carry_the_settings_and_the_seed():
    kept: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_response_tokens": 5}
    config = RolloutConfig(**kept, stop=("\n",), prompts_per_step=3, group_size=5)
    assert config.sampling_params(seed=4) == SamplingParams(**kept, stop=("\n",), seed=4)
    assert config.responses_per_step == 15
    assert not RolloutConfig().sampling_params(seed=0).is_truncated


def test_the_steps_supports_are_shared_out_evenly():
    config = RolloutConfig(prompts_per_step=3, group_size=5, max_support_mib=2)
    assert config.max_support_ids == 2 * 2**20 // 4 // 15


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", "vllm2"),
        ("prompts_per_step", 0),
        ("group_size", 0),
        ("temperature", 0.0),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("max_response_tokens", 0),
        ("stop", ("a", "")),
        ("max_concurrent_responses", 0),
        ("cache_tokens", 0),
        ("timeout_s", 0.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("max_support_mib", 0),
    ],
)
def test_nonsense_is_refused_by_name(key: str, value: Any):
    with pytest.raises(ValidationError, match=key):
        RolloutConfig.model_validate({key: value})


def test_every_setting_says_what_it_is():
    assert all(field.description for field in RolloutConfig.model_fields.values())


def test_settings_and_protocol_import_neither_torch_nor_transformers():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; "
        "from ratoon.rollout import RolloutConfig, RolloutEngine, RolloutError; "
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *sys.path], check=True)


def test_every_public_name_resolves():
    assert [name for name in ratoon.rollout.__all__ if getattr(ratoon.rollout, name).__name__ != name] == []


@pytest.mark.parametrize(
    ("engine", "table", "key"),
    [
        ("transformers", {"server": {"url": "http://127.0.0.1:8000"}}, "server.url"),
        ("paged", {"vllm": {"sleep": 2}}, "vllm.sleep"),
        ("vllm", {"server": {"command": ("python",)}}, "server.command"),
        ("vllm-server", {"server": {"command": ("python",)}, "vllm": {"enforce_eager": False}}, "vllm.enforce_eager"),
    ],
)
def test_a_table_of_another_engine_is_refused_by_name(engine: str, table: dict[str, Any], key: str):
    with pytest.raises(ValidationError, match=rf'{key} does not act on engine = "{engine}"'):
        RolloutConfig.model_validate({"engine": engine, **table})


def test_a_table_as_it_is_by_default_goes_with_every_engine():
    """Stored recipes hold all tables."""
    stored = RolloutConfig(engine="paged").model_dump()
    assert RolloutConfig.model_validate(stored) == RolloutConfig(engine="paged")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1:8000",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://[::1",
        "http://a host:80",
        "http://127.0.0.1:80/?a=b",
        "http://127.0.0.1:80/#part",
        "http://:secret@127.0.0.1:80",
    ],
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(ValidationError, match=r"url"):
        RolloutConfig.model_validate({"engine": "vllm-server", "server": {"url": url}})


def test_an_address_is_kept_without_its_last_slash():
    config = RolloutConfig.model_validate({"engine": "vllm-server", "server": {"url": "https://[::1]:8000/"}})
    assert config.server.url == "https://[::1]:8000"


@pytest.mark.parametrize("engine", ["transformers", "vllm", "vllm-server", "sglang-server"])
def test_routes_are_refused_on_engines_that_return_none(engine: Any):
    with pytest.raises(ValidationError, match=f'engine = "{engine}" does not say which experts it chose; set engine ='):
        RolloutConfig(engine=engine, return_routed_experts=True)
    assert RolloutConfig(engine="paged", return_routed_experts=True).return_routed_experts


@pytest.mark.parametrize(
    ("asked", "device_type", "model", "given"),
    [
        ({}, "cuda", {}, "paged"),
        ({}, "cpu", {}, "transformers"),
        ({}, "cuda", {"is_quantised": True}, "transformers"),
        ({}, "cpu", {"is_batch_invariant": True}, "paged"),
        ({"return_routed_experts": True}, "cpu", {}, "paged"),
        ({"engine": "transformers"}, "cuda", {"is_batch_invariant": True}, "transformers"),  # refused elsewhere
        ({"engine": "paged"}, "cpu", {}, "paged"),
    ],
)
def test_auto_takes_the_fastest_engine_that_can(
    asked: dict[str, Any], device_type: str, model: dict[str, bool], given: str
):
    of_model = {"is_quantised": False, "is_batch_invariant": False} | model
    assert RolloutConfig(**asked).engine_on(device_type, **of_model) == given
