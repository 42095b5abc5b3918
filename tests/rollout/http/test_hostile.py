"""Whatever a server answers, a call ends soon: with responses, or with an error that names what was wrong."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.rollout.http.conftest import Bench
from tests.rollout.http.fake import Fault, Handler
from tests.rollout.tiny import draw, make_prompts

from ratoon.rollout import RolloutError, RolloutStalledError
from ratoon.types import SamplingParams

SAMPLING = SamplingParams(temperature=0.7, max_response_tokens=11, seed=3)


def events(*found: object, ends: bool = True) -> Fault:
    def answer(handler: Handler) -> None:
        handler.begin_events()
        for event in found:
            handler.send_event(event)
        if ends:
            handler.send_event("[DONE]")

    return answer


def vllm_event(token_ids: object, logprobs: object, end: str | None = None, **more: object) -> dict[str, object]:
    choice = {"index": 0, "logprobs": {"token_logprobs": logprobs}, "token_ids": token_ids, "finish_reason": end}
    return {"choices": [choice | more]}


def sglang_event(pairs: object, count: int, end: object = None) -> dict[str, object]:
    return {"meta_info": {"output_token_logprobs": pairs, "completion_tokens": count, "finish_reason": end}}


def broken_off(handler: Handler) -> None:
    handler.close_connection = True


def garbled(text: str) -> Fault:
    def answer(handler: Handler) -> None:
        handler.begin_events()
        handler.wfile.write(text.encode())

    return answer


COMMON: list[tuple[Fault, str]] = [
    (lambda h: h.send_json({"error": {"message": "out of blocks"}}, 500), r"HTTP 500: out of blocks"),
    (lambda h: h.send_json({"detail": "bad token"}, 400), r"HTTP 400"),
    (lambda h: h.send_text("<html>bad gateway</html>", 502), r"HTTP 502: .*bad gateway"),
    (events({"error": {"message": "EngineCore failed"}}), r"the server failed: EngineCore failed"),
    (garbled('data: {"choices": [{"ind\n\ndata: [DONE]\n\n'), r"an event is not JSON: '\{\"choices\": \[\{\"ind'"),
    (events(json.dumps([1])), r"an event is no object"),
    (events(), r"ended a response after 0 tokens 3 times"),
    (events({"id": "x"}), r"sent no (choices|meta_info)"),
]
VLLM: list[tuple[Fault, str]] = [
    (events({"choices": [{"index": 0}, {"index": 1}]}), r"sent 2 choices where one response was asked for"),
    (events({"choices": [{"index": 3}]}), r"sent 1 choices where one"),
    (events(vllm_event([5], [float("nan")])), r"gave token 5 the log-prob nan"),
    (events(vllm_event([5], [None])), r"gave token 5 the log-prob None"),
    (events(vllm_event([5], [-9999.0])), r"gave token 5 the log-prob None"),
    (events(vllm_event([5], [0.5])), r"gave token 5 the log-prob 0.5"),
    (events(vllm_event([5, 6], [-0.5])), r"sent 2 tokens with 1 log-probs"),
    (events(vllm_event(None, [-0.5])), r"sent no token_ids, which return_token_ids asks for"),
    (events(vllm_event(["a"], [-0.5])), r"sent \['a'\] where token ids belong"),
    (events(vllm_event([9_999], [-0.5])), r"drew token id 9999, but the policy has 258"),
    (events(vllm_event([5], [-0.5], "tool_calls")), r"ended the response by 'tool_calls'"),
]
SGLANG: list[tuple[Fault, str]] = [
    (events(sglang_event([[float("nan"), 5, None]], 1)), r"gave token 5 the log-prob nan"),
    (events(sglang_event([[-0.5, 5, None]], 3)), r"sent 1 log-probs of a response of 3 tokens, 0 of which"),
    (events(sglang_event([[-0.5, 9_999, None]], 1)), r"drew token id 9999, but the policy has 258"),
    (events(sglang_event([-0.5], 1)), r"pairs belong"),
    (
        events(sglang_event([], 0, {"type": "abort", "status_code": 500, "message": "oom"})),
        r"gave the response up: 'oom'",
    ),
]


def _failure(bench: Bench, fault: Fault, **settings: Any) -> tuple[RolloutError, float]:
    """What a call of four responses raises when the server answers with `fault`, and the seconds that it took."""
    engine = bench.engines[0] if bench.engines else bench.build(**settings)
    draw(engine, make_prompts([3]), 1, SAMPLING)
    bench.server.faults[bench.generate_path] = fault
    start = time.monotonic()
    with pytest.raises(RolloutError) as raised:
        draw(engine, make_prompts([4]), 4, SAMPLING)
    took_s = time.monotonic() - start
    bench.server.faults.clear()
    assert draw(engine, make_prompts([3]), 1, SAMPLING)[0].responses[0].num_tokens > 0, "the engine serves on"
    return raised.value, took_s


def test_every_bad_answer_has_a_name(bench: Bench):
    """miles#1012: swallowed errors held their slots for hours."""
    for fault, message in [*COMMON, *(VLLM if bench.kind == "vllm-server" else SGLANG)]:
        error, took_s = _failure(bench, fault)
        assert error.args and re.search(message, str(error)), (message, str(error))
        assert bench.server.url in str(error) or "server" in str(error)
        assert took_s < 5


@pytest.mark.parametrize("fault", [broken_off, events({"choices": []}, ends=False)])
def test_connections_that_break_off_without_end_are_named(bench: Bench, fault: Callable[[Handler], None]):
    """A server that is well but closes every connection is asked a few times, then named."""
    if bench.kind == "sglang-server" and fault is not broken_off:
        pytest.skip("an event without a response is vLLM's")
    error, took_s = _failure(bench, fault)
    assert "ended a response after 0 tokens 3 times" in str(error) and took_s < 5


def test_a_stream_that_breaks_off_once_goes_on_from_its_tokens(bench: Bench):
    engine = bench.build()
    draw(engine, make_prompts([3]), 1, SAMPLING)
    bodies = bench.server.bodies
    num_broken = 0

    def break_off_first(handler: Handler) -> None:
        nonlocal num_broken
        num_broken += 1
        handler.begin_events()
        first = vllm_event([7, 8], [-1.0, -2.0]) if bench.kind == "vllm-server" else None
        handler.send_event(first or sglang_event([[-1.0, 7, None], [-2.0, 8, None]], 2))
        bench.server.faults.clear()

    bench.server.faults[bench.generate_path] = break_off_first
    (response,) = draw(engine, make_prompts([4]), 1, SAMPLING)[0].responses
    assert num_broken == 1 and response.token_ids[:2].tolist() == [7, 8] and response.num_tokens > 2
    sent = bodies[-1]["prompt" if bench.kind == "vllm-server" else "input_ids"]
    assert sent == [*make_prompts([4])[0].token_ids.tolist(), 7, 8]


def test_a_slow_drip_of_bytes_is_no_progress(bench: Bench):
    """prime-rl#1713: waiting on a server that sends something, but no token, for ever."""

    def drip(handler: Handler) -> None:
        handler.begin_events()
        for _ in range(400):
            handler.wfile.write(b": keep-alive\n\n")
            handler.wfile.flush()
            time.sleep(0.01)

    error, took_s = _failure(bench, drip, timeout_s=0.5)
    assert isinstance(error, RolloutStalledError) and took_s < 3
    assert "4 of 4 responses are unfinished after 0 tokens" in str(error) and "rollout.timeout_s=0.5" in str(error)


def test_waiting_for_others_is_no_stall(bench: Bench):
    """axolotl#3516: a limit of one call was applied to many."""
    bench.server.token_s = 0.02
    engine = bench.build(max_concurrent_responses=1, timeout_s=0.6)
    start = time.monotonic()
    groups = draw(engine, make_prompts([3, 4]), 3, SAMPLING)
    assert time.monotonic() - start > 0.6 and all(group.group_size == 3 for group in groups)


def test_a_control_request_that_hangs_is_named(bench: Bench):
    engine = bench.build({"request_timeout_s": 0.8})
    draw(engine, make_prompts([3]), 1, SAMPLING)
    path = "/pause" if bench.kind == "vllm-server" else "/pause_generation"
    bench.server.faults[path] = lambda handler: time.sleep(1.6)
    start = time.monotonic()
    with pytest.raises(RolloutError, match=rf"POST {path}: no answer within 0\.8 s"):
        asyncio.run(engine.update_weights({}, 1))
    assert time.monotonic() - start < 5


def test_an_attached_server_that_goes_away_is_named_at_once(bench: Bench):
    bench.server.token_s = 0.05
    engine = bench.build()
    draw(engine, make_prompts([3]), 1, SamplingParams(max_response_tokens=1))

    async def run() -> None:
        task = asyncio.create_task(engine.generate(make_prompts([3])[0], group_size=2, sampling=SAMPLING, step=0))
        await asyncio.sleep(0.15)
        bench.server.is_healthy = False
        bench.server.faults[bench.generate_path] = broken_off
        for stream in list(engine._session()._streams):
            stream.cancel()
        with pytest.raises(RolloutError, match=r"is gone: .*It was not started by this run"):
            await task

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 5
