"""A server that the run starts: ready or named, ended with all that it started, and started again where told to."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.rollout.http.fake import policy_logprobs
from tests.rollout.tiny import byte_tokenizer, draw, make_prompts, tiny_qwen3

from ratoon.rollout import RolloutConfig, RolloutError
from ratoon.rollout.engines.http.engine import ServerEngine
from ratoon.rollout.engines.http.link import _without
from ratoon.rollout.engines.http.process import ServerProcess, describe_exit
from ratoon.types import FinishReason, RolloutGroup, SamplingParams, UserError

ROOT = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("serve_fake.py")
SAMPLING = SamplingParams(temperature=0.7, max_response_tokens=40, seed=3)
Build = Callable[..., ServerEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    engines: list[ServerEngine] = []

    def make(*options: str, **server: Any) -> ServerEngine:
        model = tiny_qwen3()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        command = (sys.executable, str(FAKE), *options)
        table = {"command": command, "environment": (f"PYTHONPATH={ROOT}:{ROOT / 'src'}",)} | server
        config = RolloutConfig(engine="vllm-server", server=table)  # pyright: ignore[reportArgumentType]
        engines.append(ServerEngine(config, model, byte_tokenizer(), tmp_path))
        return engines[-1]

    yield make
    for engine in engines:
        asyncio.run(engine.close())


def server_and_worker(run_dir: Path) -> tuple[int, int]:
    """Process ids of the last server that was started there, and of its worker."""
    found = re.findall(r"server (\d+) worker (\d+) dev 1", (run_dir / "server.log").read_text())
    return int(found[-1][0]), int(found[-1][1])


def wait_until_gone(*pids: int) -> None:
    end = time.monotonic() + 15
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < end, f"processes {pids} are still there"
        time.sleep(0.05)


def test_a_server_begins_with_the_first_call_and_ends_with_the_engine(build: Build, tmp_path: Path):
    engine = build()
    assert not (tmp_path / "server.log").exists()
    (group,) = draw(engine, make_prompts([5]), 2, SAMPLING)
    assert all(response.num_tokens for response in group.responses)
    pids = server_and_worker(tmp_path)
    home = engine._folders.home
    assert home.is_dir()
    start = time.monotonic()
    asyncio.run(engine.close())
    assert time.monotonic() - start < 12
    wait_until_gone(*pids)
    assert not home.exists()


def test_a_server_that_does_not_start_shows_its_last_errors(build: Build):
    with pytest.raises(UserError, match=r"exit status 3; its log is .*server\.log and ends\n  RuntimeError: no kernel"):
        draw(build("--behaviour", "fails"), make_prompts([5]), 2, SAMPLING)


def test_a_server_that_is_never_ready_is_named(build: Build):
    start = time.monotonic()
    with pytest.raises(
        UserError, match=r"not ready after rollout\.server\.ready_timeout_s = 3 s, and was ended; .*\n  loading"
    ):
        draw(build("--behaviour", "sleeps", ready_timeout_s=3), make_prompts([5]), 2, SAMPLING)
    assert time.monotonic() - start < 20


def test_a_program_that_is_not_there_is_the_users_error(build: Build):
    with pytest.raises(UserError, match=r"'/no/such/python', which is no program"):
        draw(build(command=("/no/such/python",)), make_prompts([5]), 2, SAMPLING)


async def kill_while_generating(engine: ServerEngine, run_dir: Path) -> RolloutGroup:
    task = asyncio.create_task(engine.generate(make_prompts([5])[0], group_size=4, sampling=SAMPLING, step=0))
    while not any(call.draft.num_tokens > 8 for call in engine._calls.values()):
        await asyncio.sleep(0.01)
    os.kill(server_and_worker(run_dir)[0], signal.SIGKILL)
    return await task


def test_a_killed_server_is_a_named_error_soon(build: Build, tmp_path: Path):
    engine = build("--token-s", "0.05")
    draw(engine, make_prompts([3]), 1, SamplingParams(max_response_tokens=1))
    worker = server_and_worker(tmp_path)[1]
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"(?s)is gone: it was killed by signal 9.*restarts = 0 allows no more"):
        asyncio.run(kill_while_generating(engine, tmp_path))
    assert time.monotonic() - start < 20
    wait_until_gone(worker)
    with pytest.raises(RolloutError, match=r"is gone: it was killed by signal 9"):
        draw(engine, make_prompts([3]), 1, SAMPLING)


def test_a_killed_server_is_started_again_and_responses_go_on(build: Build, tmp_path: Path):
    """TRL#7176: one failure of the engine was the end of the run. The tokens that were drawn are kept."""
    engine = build("--token-s", "0.02", restarts=1)
    draw(engine, make_prompts([3]), 1, SamplingParams(max_response_tokens=1))
    group = asyncio.run(kill_while_generating(engine, tmp_path))
    assert engine._link.num_starts == 2
    for response in group.responses:
        assert response.finish_reason in (FinishReason.EOS, FinishReason.LENGTH)
        tokens = [*group.prompt.token_ids.tolist(), *response.token_ids.tolist()]
        assert response.rollout_logprobs is not None
        for index, logprob in enumerate(response.rollout_logprobs, start=5):
            assert abs(policy_logprobs(0.5, tokens[:index], 0.7)[tokens[index]] - logprob) < 1e-5
    with pytest.raises(RolloutError, match=r"started again 1 time, and rollout\.server\.restarts = 1 allows no more"):
        asyncio.run(kill_while_generating(engine, tmp_path))


def test_a_killed_server_is_started_with_the_new_weights(build: Build, tmp_path: Path):
    engine = build(restarts=1)
    draw(engine, make_prompts([3]), 1, SAMPLING)
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter.fill_(0.75)
    os.kill(server_and_worker(tmp_path)[0], signal.SIGKILL)
    asyncio.run(engine.update_weights({}, 1))
    assert engine.policy_version == 1
    (group,) = draw(engine, make_prompts([5]), 1, SAMPLING)
    first = group.responses[0]
    assert first.rollout_logprobs is not None
    wanted = policy_logprobs(0.75, group.prompt.token_ids.tolist(), 0.7)[first.token_ids[0]]
    assert abs(first.rollout_logprobs[0] - wanted) < 1e-5


_OWNER = """
import sys, time
from pathlib import Path
from ratoon.rollout.engines.http.process import ServerProcess
run = Path(sys.argv[1])
(run / "weights").mkdir()
child = "import os, subprocess as s; p = s.Popen(['sleep', '1000']); print(os.getpid(), p.pid, flush=True); p.wait()"
command = [sys.executable, "-c", child]
process = ServerProcess(command, [], log=run / "server.log", folder=run / "weights")
print(process.pid, flush=True)
time.sleep(1000)
"""


def test_a_server_dies_with_an_owner_that_is_killed(tmp_path: Path):
    """Even `kill -9` of the run leaves no server with the memory of a GPU, no worker of it, and no weights."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    log = tmp_path / "server.log"
    end = time.monotonic() + 20
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.05)
    server, worker = map(int, log.read_text().split())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until_gone(keeper, server, worker)
    assert not (tmp_path / "weights").exists()


def test_a_server_dies_with_its_keeper(tmp_path: Path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    log = tmp_path / "log"
    process = ServerProcess([sys.executable, "-c", child], [], log=log, folder=tmp_path / "none")
    while not log.read_text():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(int(log.read_text()))
    process.stop()
    assert process.exit_status() is not None


def test_exit_statuses_and_logs_in_words(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier run\n")
    process = ServerProcess([sys.executable, "-c", "import sys; sys.exit(7)"], [], log=log, folder=tmp_path / "none")
    while process.exit_status() is None:
        time.sleep(0.02)
    assert describe_exit(process.exit_status() or 0) == "it ended with exit status 7"
    assert process.last_complaints() == "  (it printed nothing)"
    with log.open("a") as more:
        more.write(
            "INFO [a.py:1] hint: may lead to `OSError: 24`\n(Core pid=1) ERROR [core.py:15] x.DeadError: gone\n" * 2
        )
    assert process.last_complaints() == "  x.DeadError: gone"
    assert describe_exit(137) == "it was killed by signal 9"
    process.stop()


def test_options_of_the_users_take_the_place_of_ours():
    ours = ["--model", "m", "--enable-prefix-caching", "--stream-interval", "8"]
    given = ("python", "--stream-interval=2", "--enable-prefix-caching")
    assert _without(ours, given) == ["--model", "m"]
