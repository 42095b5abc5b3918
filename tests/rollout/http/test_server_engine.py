"""What a server engine asks of a server, and what it makes of the answers, for both kinds of server."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rollout.http.conftest import VERSIONS, Bench
from tests.rollout.http.fake import policy_logprobs
from tests.rollout.parts import in_parts
from tests.rollout.tiny import EOS, NUM_BYTES, byte_tokenizer, draw, make_prompts

from ratoon.rollout import RolloutConfig, RolloutEngine, RolloutError, RolloutStalledError, build_engine
from ratoon.rollout.engines.http.engine import ServerEngine
from ratoon.rollout.probing import ProbedEngine
from ratoon.rollout.stopping import StopStrings, decode
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams, UserError

SAMPLING = SamplingParams(temperature=0.7, max_response_tokens=11, seed=3)
LONG = SamplingParams(temperature=0.7, max_response_tokens=60, seed=3)


def assert_logprobs(group: RolloutGroup, weights_of_version: dict[int, float], temperature: float) -> None:
    """Each token's log-prob is that of the policy of its version, after exactly the tokens before it."""
    for response in group.responses:
        assert response.rollout_logprobs is not None and response.policy_versions is not None
        tokens = [*group.prompt.token_ids.tolist(), *response.token_ids.tolist()]
        for index in range(response.num_tokens):
            end = group.prompt.num_tokens + index
            weights = weights_of_version[int(response.policy_versions[index])]
            wanted = policy_logprobs(weights, tokens[:end], temperature)[tokens[end]]
            assert abs(response.rollout_logprobs[index] - wanted) < 1e-5


def test_engine_is_a_probed_rollout_engine(bench: Bench):
    engine = bench.build()
    assert isinstance(engine, RolloutEngine) and isinstance(engine, ProbedEngine)


def test_tokens_and_logprobs_are_the_servers(bench: Bench):
    """TRL#4159: log-probs are those of the temperature that was drawn at. verl#6921: ids come as they were drawn, never
    from text."""
    prompts = make_prompts([1, 7, 33])
    groups = draw(bench.build(), prompts, 3, SAMPLING)
    assert bench.server.num_loads == 1, "the server is given the policy before it draws"
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.prompt is prompt and group.group_size == 3
        assert_logprobs(group, {0: 0.5}, 0.7)
        for response in group.responses:
            tokens = response.token_ids.tolist()
            assert EOS not in tokens[:-1]
            ended = FinishReason.EOS if tokens[-1] == EOS else FinishReason.LENGTH
            assert response.finish_reason is ended and (ended is FinishReason.EOS or len(tokens) == 11)
            assert response.text == decode(byte_tokenizer(), response.token_ids.tolist())


def test_draws_follow_seed_step_id_and_index(bench: Bench):
    engine = bench.build(max_concurrent_responses=2)
    prompt = make_prompts([9])[0]
    first = draw(engine, [prompt], 3, SAMPLING)[0]
    again = draw(engine, [prompt], 3, SAMPLING)[0]
    texts = [response.token_ids.tolist() for response in first.responses]
    assert texts == [response.token_ids.tolist() for response in again.responses]
    assert len({tuple(text) for text in texts}) == 3
    other_step = draw(engine, [prompt], 3, SAMPLING, step=1)[0]
    other_id = draw(engine, [Prompt("another", prompt.token_ids)], 3, SAMPLING)[0]
    for other in (other_step, other_id):
        assert other.responses[0].token_ids.tolist() not in texts


def test_requests_say_everything_outright(bench: Bench):
    """What a request leaves out, servers take from the model folder: top_p and the like would bend the policy."""
    draw(bench.build(), make_prompts([4]), 1, SAMPLING)
    body = bench.server.bodies[-1]
    asked = body if bench.kind == "vllm-server" else body["sampling_params"]
    wanted = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [EOS]}
    assert wanted.items() <= asked.items()
    assert asked["presence_penalty"] == asked["frequency_penalty"] == 0.0


def test_stop_strings_end_a_response_across_tokens(bench: Bench):
    engine = bench.build()
    prompt = make_prompts([12])[0]
    free = draw(engine, [prompt], 4, LONG)[0]
    tokenizer = byte_tokenizer()
    texts = [
        decode(tokenizer, response.token_ids[start : start + 2].tolist())
        for response in free.responses
        for start in range(3, response.num_tokens - 1)
    ]
    stop = next(text for text in texts if len(text) == 2 and text.isascii() and text.isprintable())
    sampling = SamplingParams(temperature=0.7, max_response_tokens=60, seed=3, stop=(stop,))
    stopped = draw(engine, [prompt], 4, sampling)[0]
    num_stopped = 0
    for whole, cut in zip(free.responses, stopped.responses, strict=True):
        tokens = whole.token_ids.tolist()
        assert tokens[: cut.num_tokens] == cut.token_ids.tolist()
        finder = StopStrings((stop,), tokenizer)
        if cut.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert cut.text.endswith(stop) and finder.ends(tokens[: cut.num_tokens])
        else:
            assert cut.num_tokens == whole.num_tokens and stop not in whole.text
    assert num_stopped >= 1


def test_greedy_responses_have_no_logprobs(bench: Bench):
    group = draw(bench.build(), make_prompts([5]), 2, SamplingParams(temperature=0.0, max_response_tokens=4))[0]
    first, second = group.responses
    assert first.rollout_logprobs is None and first.token_ids.tolist() == second.token_ids.tolist()


def test_new_weights_while_responses_are_in_flight(bench: Bench):
    """None lost, none doubled, versions rise, and each token's log-prob is its own version's. miles#2589,
    tpu-inference#3362: a pause that ends responses on the server loses none here."""
    bench.server.token_s = 0.005
    engine = bench.build()
    draw(engine, make_prompts([3]), 1, SAMPLING)
    weights = {0: 0.5}

    async def run() -> list[RolloutGroup]:
        prompts = make_prompts([5, 17, 33])
        calls = [engine.generate(p, group_size=3, sampling=LONG, step=0) for p in prompts]
        tasks = [asyncio.create_task(call) for call in calls]
        for version in (1, 2, 3):
            await asyncio.sleep(0.08)
            weights[version] = 0.5 + version / 8
            bench.set_weights(weights[version])
            await engine.update_weights({}, version)
            assert engine.policy_version == version
        return list(await asyncio.gather(*tasks))

    groups = asyncio.run(run())
    assert bench.server.weight_name == "3" and bench.server.num_loads == 4 and not bench.server.is_paused
    seen: set[int] = set()
    for group in groups:
        assert_logprobs(group, weights, 0.7)
        for response in group.responses:
            assert response.finish_reason in (FinishReason.EOS, FinishReason.LENGTH)
            assert response.policy_versions is not None and (np.diff(response.policy_versions) >= 0).all()
            seen |= set(response.policy_versions.tolist())
    assert len(seen) >= 3


def test_weight_files_are_removed(bench: Bench, tmp_path: Path):
    """prime-rl#1857: a folder was deleted that a server was about to load. Here one goes once it was read."""
    engine = bench.build({"transfer_folder": str(tmp_path)})
    draw(engine, make_prompts([3]), 1, SAMPLING)
    asyncio.run(engine.update_weights({}, 1))
    (home,) = tmp_path.iterdir()
    assert list(home.iterdir()) == []
    asyncio.run(engine.close())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_update_leaves_no_half_loaded_policy(bench: Bench):
    """TRL#5892: the end of an update was skipped when the transfer failed. Here the server is resumed, and nothing is
    drawn before weights have arrived whole."""
    engine = bench.build()
    draw(engine, make_prompts([3]), 1, SAMPLING)
    path = "/collective_rpc" if bench.kind == "vllm-server" else "/update_weights_from_disk"
    bench.server.faults[path] = lambda handler: handler.send_json({"error": {"message": "shape mismatch"}}, 500)
    with pytest.raises(RolloutError, match=r"HTTP 500: shape mismatch"):
        asyncio.run(engine.update_weights({}, 1))
    assert not bench.server.is_paused and engine.policy_version == 0
    with pytest.raises(RolloutError, match=r"has not taken weights of version 1.*shape mismatch"):
        draw(engine, make_prompts([3]), 1, SAMPLING)
    bench.server.faults.clear()
    asyncio.run(engine.update_weights({}, 2))
    assert draw(engine, make_prompts([3]), 1, SAMPLING)[0].responses[0].num_tokens > 0


def test_abort_hands_over_what_there_is(bench: Bench):
    bench.server.token_s = 0.01
    engine = bench.build()
    draw(engine, make_prompts([3]), 1, SAMPLING)

    async def run() -> RolloutGroup:
        task = asyncio.create_task(engine.generate(make_prompts([5])[0], group_size=3, sampling=LONG, step=0))
        await asyncio.sleep(0.25)
        await engine.abort()
        return await asyncio.wait_for(task, 1)

    group = asyncio.run(run())
    assert_logprobs(group, {0: 0.5}, 0.7)
    reasons = {response.finish_reason for response in group.responses}
    assert FinishReason.ABORT in reasons and reasons <= {FinishReason.ABORT, FinishReason.EOS}
    assert all(0 < response.num_tokens < 60 for response in group.responses)
    assert draw(engine, make_prompts([3]), 1, SAMPLING)[0].responses[0].num_tokens > 0


def test_pause_holds_and_resume_goes_on(bench: Bench):
    bench.server.token_s = 0.01
    engine = bench.build()

    async def run() -> RolloutGroup:
        task = asyncio.create_task(engine.generate(make_prompts([5])[0], group_size=2, sampling=LONG, step=0))
        await asyncio.sleep(0.2)
        await engine.pause()
        num_bodies = len(bench.server.bodies)
        await asyncio.sleep(0.1)
        assert bench.server.is_paused and len(bench.server.bodies) == num_bodies and not task.done()
        await engine.update_weights({}, 1)
        await asyncio.sleep(0.05)
        assert len(bench.server.bodies) == num_bodies, "new weights do not end a pause"
        await engine.resume()
        return await task

    group = asyncio.run(run())
    assert_logprobs(group, {0: 0.5, 1: 0.5}, 0.7)
    assert all(response.finish_reason in (FinishReason.EOS, FinishReason.LENGTH) for response in group.responses)


def test_a_pause_without_resume_is_a_named_timeout(bench: Bench):
    engine = bench.build(timeout_s=0.3)

    async def run() -> None:
        await engine.pause()
        with pytest.raises(RolloutStalledError, match="the engine is paused and was not resumed"):
            await engine.generate(make_prompts([3])[0], group_size=1, sampling=SAMPLING, step=0)

    asyncio.run(run())


def test_a_group_goes_on_from_a_budget(bench: Bench):
    """verl#7207: a resumed response went over its budget."""
    engine = bench.build()
    prompt = make_prompts([6])[0]
    group = asyncio.run(in_parts(engine, prompt, 3, LONG, [7, 5], step=2))
    assert_logprobs(group, {0: 0.5}, 0.7)
    assert all(response.num_tokens <= 60 for response in group.responses)
    sent = bench.server.bodies[-1]
    assert (sent["prompt"] if bench.kind == "vllm-server" else sent["input_ids"])[:6] == prompt.token_ids.tolist()


def test_scores_are_of_temperature_one(bench: Bench):
    tokens = np.random.default_rng(3).integers(0, NUM_BYTES, 17)
    scores_M = asyncio.run(bench.build().score(tokens))
    wanted = [policy_logprobs(0.5, tokens[:i].tolist(), 1.0)[tokens[i]] for i in range(1, tokens.size)]
    np.testing.assert_allclose(scores_M, wanted, rtol=0, atol=1e-12)


def test_a_cancelled_call_ends_its_streams(bench: Bench):
    """TRL#7176: what nobody waited for any more kept the engine busy."""
    bench.server.token_s = 0.01
    engine = bench.build()

    async def run() -> None:
        task = asyncio.create_task(engine.generate(make_prompts([5])[0], group_size=2, sampling=LONG, step=0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine._calls and not engine._session()._streams

    asyncio.run(run())


@pytest.mark.parametrize("is_incremental", [False, True])
def test_sglang_sends_all_tokens_or_the_new_ones(bench: Bench, is_incremental: bool):
    bench.server.is_incremental = is_incremental
    assert_logprobs(draw(bench.build(), make_prompts([5]), 2, SAMPLING)[0], {0: 0.5}, 0.7)


def test_logprobs_of_another_temperature_are_refused(bench: Bench):
    """TRL#4159: the server's log-probs left the temperature out."""
    bench.server.scales_logprobs = False
    with pytest.raises(UserError, match=r"not those of the sampling temperature: .* 1\.00 times"):
        draw(bench.build(), make_prompts([3]), 1, SAMPLING)


def test_another_version_is_refused(bench: Bench):
    bench.server.version = {"vllm-server": "0.9.1", "sglang-server": "0.4.9"}[bench.kind]
    with pytest.raises(UserError, match=r"is (vLLM 0\.9\.1|SGLang 0\.4\.9)"):
        draw(bench.build(), make_prompts([3]), 1, SAMPLING)


def test_a_server_without_its_control_endpoints_is_refused(bench: Bench):
    path = "/is_paused" if bench.kind == "vllm-server" else "/continue_generation"
    bench.server.faults[path] = lambda handler: handler.send_json({"detail": "Not Found"}, 404)
    with pytest.raises(UserError, match=r"VLLM_SERVER_DEV_MODE=1|no /continue_generation"):
        draw(bench.build(), make_prompts([3]), 1, SAMPLING)


def test_a_prompt_that_the_server_cannot_hold_is_the_users_error(bench: Bench):
    bench.server.max_model_len = 20
    with pytest.raises(UserError, match=r"'p0' has 10 tokens; .* over the 20 of the"):
        draw(bench.build(), make_prompts([10]), 1, SAMPLING)


def test_no_server_at_the_address(bench: Bench):
    engine = bench.build({"url": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match=r"no healthy .* server at http://127\.0\.0\.1:9"):
        draw(engine, make_prompts([3]), 1, SAMPLING)


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"cache_tokens": 64}])
def test_what_is_not_exact_is_refused_by_name(bench: Bench, setting: dict[str, Any]):
    """TRL#6789: log-probs were renormalised over tokens that nobody recorded."""
    with pytest.raises(UserError, match=next(iter(setting))):
        bench.build(**setting)


def test_the_api_key_comes_from_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    engine = bench.build({"api_key_variable": "RATOON_TEST_KEY"})
    with pytest.raises(UserError, match="RATOON_TEST_KEY, which is not set"):
        draw(engine, make_prompts([3]), 1, SAMPLING)
    monkeypatch.setenv("RATOON_TEST_KEY", "secret-1")
    draw(bench.build({"api_key_variable": "RATOON_TEST_KEY"}), make_prompts([3]), 1, SAMPLING)
    assert set(bench.server.keys) == {"Bearer secret-1"}


def test_the_factory_builds_it(bench: Bench):
    config = RolloutConfig(engine=bench.kind, server={"url": bench.server.url})  # pyright: ignore
    engine = build_engine(config, bench.model, byte_tokenizer())
    assert isinstance(engine, ServerEngine)
    bench.engines.append(engine)
    with pytest.raises(UserError, match=r"needs \[rollout.server\] with url"):
        build_engine(RolloutConfig(engine=bench.kind), bench.model, byte_tokenizer())  # pyright: ignore
    assert VERSIONS[bench.kind]
