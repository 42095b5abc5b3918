"""What a recipe's rollout engine cannot do is said before anything loads, by every command alike."""

from collections.abc import Sequence

import pytest
from tests.loop.tiny_run import TinyRun

SERVER = "--rollout.engine=vllm-server"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ((SERVER,), "needs [rollout.server] with url"),
        (("--rollout.engine=paged", "--rollout.return_routed_experts=true"), "the model is dense: it has none"),
        (("--rollout.engine=vllm", "--rollout.cache_tokens=64"), "vllm"),  # missing, or another measure of its cache
        ((SERVER, "--rollout.server.command=['/no/such/python']"), "'/no/such/python', which is no program"),
        ((SERVER, "--rollout.server.url=http://[::1]:9", "--evaluation.top_p=0.5"), "does not say which tokens top_p"),
        (
            (SERVER, "--rollout.server.url=http://[::1]:9", "--rollout.server.api_key_variable=RATOON_NO_KEY"),
            "RATOON_NO_KEY, which is not set",
        ),
        (("--rollout.cache_tokens=31",), "needs 32 cache tokens, over rollout.cache_tokens=31; raise it"),
        (
            ("--rollout.engine=paged", "--rollout.cache_tokens=127"),
            "needs 128 cache tokens in blocks of 64, over rollout.cache_tokens=127; raise it",
        ),
        (
            ("--rollout.cache_tokens=32", "--evaluation.max_response_tokens=20"),
            "with a response of up to 20 needs 48 cache tokens, over rollout.cache_tokens=32; raise it",
        ),
    ],
)
def test_a_plan_refuses_what_training_would_before_it_loads_a_model(
    tiny: TinyRun, overrides: Sequence[str], complaint: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ratoon.loop.run.load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    trained = tiny.train(*overrides)
    planned = tiny.main(["plan", str(tiny.recipe), *overrides])
    assert (trained.status, planned.status) == (2, 2)
    assert complaint in trained.err
    assert trained.err.removeprefix("ratoon train: ") == planned.err.removeprefix("ratoon plan: ")
    assert not tiny.run_dir.exists()


@pytest.mark.parametrize(("engine", "cache_tokens"), [("transformers", 32), ("paged", 128)])
def test_the_least_cache_that_a_plan_lets_pass_is_enough(tiny: TinyRun, engine: str, cache_tokens: int):
    """The numbers that the engine itself goes by."""
    overrides = (f"--rollout.engine={engine}", f"--rollout.cache_tokens={cache_tokens}", "--trainer.num_steps=1")
    assert tiny.main(["plan", str(tiny.recipe), *overrides]).status == 0
    assert tiny.train(*overrides).status == 0


def test_sampling_of_evaluations_that_are_not_made_is_not_checked(tiny: TinyRun):
    server = (SERVER, "--rollout.server.url=http://[::1]:9", "--evaluation.top_p=0.5")
    outcome = tiny.main(["plan", str(tiny.recipe), *server, "--data.num_heldout=0"])
    assert outcome.status == 0


def test_a_server_that_is_not_there_does_not_cost_the_warm_start(tiny: TinyRun):
    outcome = tiny.train(SERVER, "--rollout.server.url=http://127.0.0.1:9")
    assert outcome.status == 2 and "no healthy vLLM server at http://127.0.0.1:9" in outcome.err
    assert [path.name for path in (tiny.run_dir / "checkpoints").iterdir()] == ["step-000000"]
    again = tiny.train(SERVER, "--rollout.server.url=http://127.0.0.1:9")
    assert again.status == 2 and again.err == outcome.err and "sft" not in again.out
