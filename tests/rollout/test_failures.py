"""What goes wrong ends in a named error, soon, and the engine serves on."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.rollout.conftest import Build
from tests.rollout.tiny import assert_same_group, draw, make_prompts
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.generation.continuous_batching.model_runner import ModelRunner

from ratoon.rollout import RolloutConfig, RolloutError, RolloutStalledError, build_engine
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.worker import WorkerThread
from ratoon.rollout.errors import NonFiniteLogitsError
from ratoon.types import SamplingParams

SAMPLING = SamplingParams(temperature=0.7, max_response_tokens=9)


@contextmanager
def held_forward(engine: InProcessEngine[Any]) -> Iterator[None]:
    """Inside, a forward pass does not return before the block ends."""
    release = threading.Event()
    hook = engine._twin.register_forward_pre_hook(lambda *_: release.wait(60) and None)
    try:
        yield
    finally:
        hook.remove()
        release.set()
        # A busy machine may take longer over a pass than the short timeouts here.
        engine._config = RolloutConfig()


def test_a_failed_forward_pass_ends_every_call_with_its_cause(build: Build):
    """TRL#7176: one failed generation was the end of the worker. Here the engine serves on."""
    engine = build()
    prompts = make_prompts([3, 20])
    num_passes = 0

    def fail(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 4:
            raise MemoryError("no room")

    hook = engine._twin.register_forward_pre_hook(fail)

    async def run() -> list[object]:
        calls = [engine.generate(prompt, group_size=2, sampling=SAMPLING, step=0) for prompt in prompts]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    errors = asyncio.run(run())
    hook.remove()
    assert errors[0] is not errors[1]
    for error in errors:
        assert isinstance(error, RolloutError)
        assert "2 prompts ('p0', 'p1'): MemoryError: no room" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    for group, reference in zip(draw(engine, prompts, 2, SAMPLING), draw(build(), prompts, 2, SAMPLING), strict=True):
        assert_same_group(group, reference)


def test_weights_that_are_not_finite_are_named(build: Build, model: Qwen3ForCausalLM):
    engine = build()
    head = model.lm_head.weight
    before = head.detach().clone()
    with torch.no_grad():
        head[5] = float("nan")
    for temperature in (0.0, 0.7):
        with pytest.raises(NonFiniteLogitsError, match="logits are not finite"):
            draw(engine, make_prompts([4]), 1, SamplingParams(temperature=temperature, max_response_tokens=3))
    with torch.no_grad():
        head.copy_(before)
    assert draw(engine, make_prompts([4]), 1, SAMPLING)[0].responses[0].num_tokens > 0


def test_a_hung_forward_pass_is_a_named_timeout(build: Build):
    """verl#7155: waiting for ever with nothing logged. Every pending call says which prompt waited, for what."""
    engine = build(timeout_s=0.3)
    prompts = make_prompts([3, 20])

    async def run() -> list[object]:
        calls = [engine.generate(prompt, group_size=2, sampling=SAMPLING, step=0) for prompt in prompts]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with held_forward(engine):
        start = time.monotonic()
        errors = asyncio.run(run())
        assert time.monotonic() - start < 3
    for index, error in enumerate(errors):
        assert isinstance(error, RolloutStalledError) and isinstance(error, TimeoutError)
        assert f"prompt 'p{index}': 2 of 2 responses are unfinished after 0 tokens" in str(error)
        assert "rollout.timeout_s=0.3" in str(error) and "forward pass of the model does not return" in str(error)
    for group, reference in zip(draw(engine, prompts, 2, SAMPLING), draw(build(), prompts, 2, SAMPLING), strict=True):
        assert_same_group(group, reference)


def test_waiting_for_a_hung_forward_pass_is_a_named_timeout(build: Build):
    """TRL#6796, TRL#6872: no join without a timeout. Whatever waits for a forward pass does not wait for ever."""
    engine = build(timeout_s=0.2)

    async def run() -> None:
        call = asyncio.create_task(engine.generate(make_prompts([3])[0], group_size=1, sampling=SAMPLING, step=0))
        await asyncio.sleep(0.05)
        for purpose, wait in (("new weights", engine.update_weights({}, 1)), ("abort", engine.abort())):
            with pytest.raises(RolloutStalledError, match=f"{purpose} waited 0.2 s"):
                await wait
        with pytest.raises(RolloutStalledError, match="1 of 1 responses"):
            await call

    with held_forward(engine):
        asyncio.run(run())
    assert draw(engine, make_prompts([4]), 1, SAMPLING)[0].responses[0].num_tokens > 0


def test_close_does_not_wait_for_ever_and_lets_the_thread_end(build: Build):
    engine = build(timeout_s=0.2)

    async def run() -> None:
        call = asyncio.create_task(engine.generate(make_prompts([3])[0], group_size=1, sampling=SAMPLING, step=0))
        await asyncio.sleep(0.05)
        with pytest.raises(RolloutStalledError, match=r"abort waited 0\.2 s"):
            await engine.close()
        with pytest.raises(RolloutStalledError, match="1 of 1 responses"):
            await call

    before = set(threading.enumerate())
    with held_forward(engine):
        asyncio.run(run())
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) == before


def test_a_pause_without_resume_is_a_named_timeout(build: Build):
    engine = build(timeout_s=0.2)

    async def run() -> None:
        await engine.pause()
        with pytest.raises(RolloutStalledError, match="the engine is paused and was not resumed"):
            await engine.generate(make_prompts([3])[0], group_size=1, sampling=SAMPLING, step=0)
        await engine.resume()

    asyncio.run(run())
    draw(engine, make_prompts([3]), 1, SAMPLING)


def test_waiting_for_ones_turn_is_no_stall(build: Build):
    """The last group waits longer than the timeout, but others move. axolotl#3516: a limit for one call was applied to
    many."""
    engine = build(timeout_s=0.6, max_concurrent_responses=1)
    engine._twin.register_forward_pre_hook(lambda *_: time.sleep(0.025))
    start = time.monotonic()
    groups = draw(engine, make_prompts([3, 4, 5]), 2, SAMPLING)
    assert time.monotonic() - start > 2 * 0.6
    assert all(group.group_size == 2 for group in groups)


def test_a_cancelled_call_is_withdrawn_and_frees_its_blocks(build: Build):
    """TRL#7176: what nobody waited for any more went on."""
    engine = build()
    prompts = make_prompts([40, 20])
    sampling = SamplingParams(temperature=0.7, max_response_tokens=60)

    async def run():
        gone = asyncio.create_task(engine.generate(prompts[0], group_size=3, sampling=sampling, step=0))
        stays = asyncio.create_task(engine.generate(prompts[1], group_size=3, sampling=sampling, step=0))
        while sum(call.draft.num_tokens for call in engine._calls.values()) < 12:
            await asyncio.sleep(0.001)
        gone.cancel()
        return await stays

    assert_same_group(asyncio.run(run()), draw(build(), [prompts[1]], 3, sampling)[0])
    # An event loop that ends early cancels everything.
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.generate(prompts[0], group_size=3, sampling=sampling, step=0), 0.02))
    assert_same_group(draw(engine, [prompts[1]], 3, sampling)[0], draw(build(), [prompts[1]], 3, sampling)[0])
    processor = engine._batch._processor
    assert processor is not None and engine._batch.num_running == 0
    assert processor.cache.get_num_free_blocks() == engine._batch._num_blocks
    assert not processor.scheduler.has_pending_requests()


def test_a_cache_that_does_not_fit_is_named(build: Build, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown",
        lambda: (torch.device("cpu"), 100_000, 0, 0),
    )
    with pytest.raises(RolloutError, match=r"'p0'.*MemoryError"):
        draw(build(), make_prompts([3]), 1, SAMPLING)


def test_another_transformers_is_refused_by_name(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    """axolotl#3971: a private method got another parameter, and those who relied on it crashed."""
    monkeypatch.setattr(ModelRunner, "_sample", lambda self, probs: None)
    with pytest.raises(RolloutError, match=r"ModelRunner._sample .* takes \('self', 'probs'\).*>=5.17,<5.18"):
        build_engine(RolloutConfig(), model, tokenizer)
    monkeypatch.delattr(ModelRunner, "_sample")
    with pytest.raises(RolloutError, match=r"ModelRunner._sample .* is missing .*>=5.17,<5.18"):
        build_engine(RolloutConfig(), model, tokenizer)


def test_another_device_than_the_models_is_refused(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="are on cpu, but got device=cuda"):
        build_engine(RolloutConfig(), model, tokenizer, "cuda:1")


def test_modules_that_appear_later_are_refused(build: Build, model: Qwen3ForCausalLM):
    engine = build()
    model.model.add_module("extra", torch.nn.Linear(2, 2))
    with pytest.raises(RolloutError, match=r"model\.extra"):
        asyncio.run(engine.update_weights({}, 1))


def test_worker_runs_calls_in_order_and_hands_errors_over():
    worker = WorkerThread("worker-under-test")
    assert worker.close(0.1), "a thread that never started has ended"
    ran: list[int] = []
    futures = [worker.submit(lambda index=index: ran.append(index) or index) for index in range(5)]
    failing = worker.submit(lambda: 1 // 0)
    assert [future.result(5) for future in futures] == ran == list(range(5))
    assert isinstance(failing.exception(5), ZeroDivisionError)
    assert worker.submit(lambda: threading.current_thread().name).result(5) == "worker-under-test"
    assert worker.close(5)
    assert "worker-under-test" not in [thread.name for thread in threading.enumerate()]
