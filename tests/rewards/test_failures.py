"""Every way in which a reward function may fail, handled by policy and counted.

verl#6673 and verl#288: one call that never returned froze a run, and no thread could stop it. InternBootcamp#15: a
regular expression did. SvS#3: scores that could not be had stopped training without a word.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.rewards.pools import RUNS_THE_RESPONSE, group_of, open_pool, rewards_of, scored

from ratoon.rewards import Cause, RewardPool
from ratoon.types import RolloutGroup, UserError

LIMIT_S = 0.5
FORK_AND_RETURN = "import os\nos.fork()\nvalue = 1"
FORK_AND_STAY = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nvalue = 1"
FAULTS = {
    "raises": ("1 / 0", Cause.RAISED, ["failed: ZeroDivisionError: division by zero", "response.py:1"]),
    "exits": ("import sys; sys.exit(3)", Cause.RAISED, ["failed: SystemExit: 3"]),
    "interrupts": ("raise KeyboardInterrupt", Cause.RAISED, ["failed: KeyboardInterrupt"]),
    "cancels": ("import asyncio; raise asyncio.CancelledError", Cause.RAISED, ["failed: CancelledError"]),
    "recurses": ("def f(): return f()\nf()", Cause.RAISED, ["failed: RecursionError"]),
    "has an odd message": (
        "class E(Exception): __str__ = lambda self: 1 / 0\nraise E", Cause.RAISED, ["failed: E, whose message cannot"],
    ),
    "has a long message": ("raise ValueError('x' * 10**7)", Cause.RAISED, ["ValueError: xxx", "more characters"]),
    "raises what cannot be pickled": (
        "import threading\nclass E(Exception): pass\nraise E(threading.Lock())", Cause.RAISED, ["failed: E"],
    ),
    "returns what cannot be pickled": ("import threading; value = threading.Lock()", Cause.INVALID, ["is lock"]),
    "returns NaN": ("value = float('nan')", Cause.INVALID, ["is nan"]),
    "returns None": ("value = None", Cause.INVALID, ["is None"]),
    "returns text": ("value = '1'", Cause.INVALID, ["is str '1'"]),
    "returns a list": ("value = [1.0, 2.0]", Cause.INVALID, ["is list"]),
    "loops": ("while True: pass", Cause.TIMEOUT, ["did not return within reward.timeout_s = 0.5 s", "mine.py:4)"]),
    "sleeps": ("import time\ntime.sleep(1000)", Cause.TIMEOUT, ["(it was at", "mine.py:4)"]),
    "hangs in C": ("import re\nre.match('(a*)*b', 'a' * 60)", Cause.TIMEOUT, ["did not return", "mine.py:4)"]),
    "hangs in C without a signal": ("x = 10 ** 10 ** 9", Cause.TIMEOUT, ["did not return"]),
    "holds on to life": (
        "import signal, time\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass",
        Cause.TIMEOUT, ["did not return"],
    ),
    "stops": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", Cause.TIMEOUT, ["did not return"]),
    "dies by signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Cause.DIED, ["signal SIGKILL"]),
    "crashes": (
        "import ctypes; ctypes.string_at(0)", Cause.DIED,
        ["signal SIGSEGV at ", "mine.py:4;", "this response: 'import ctypes"],
    ),
    "leaves": ("import os; os._exit(7)", Cause.DIED, ["ended with exit status 7"]),
    "leaves with status 0": ("import os; os._exit(0)", Cause.DIED, ["ended with exit status 0"]),
    "says why it leaves": ("import os; os.write(2, b'no licence\\n'); os._exit(1)", Cause.DIED, ["no licence"]),
    "closes its files": ("import os; os.closerange(0, 1000); value = 1", Cause.DIED, ["its worker"]),
    "writes into all files": (
        "import os\nfor fd in range(3, 50):\n    try: os.write(fd, b'nonsense\\n')\n    except OSError: pass\n"
        "value = 1",
        Cause.DIED, ["closed the pipes to the run, or wrote into them"],
    ),
}  # fmt: skip


POLICIES = ("raise", "zero", "drop")
CASES = [(policy, name) for policy in POLICIES[:2] for name in FAULTS] + [("drop", name) for name in [*FAULTS][::4]]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RewardPool]]:
    """One for each policy."""
    with ExitStack() as stack:
        yield {
            policy: stack.enter_context(
                open_pool(
                    tmp_path_factory.mktemp("rewards"), RUNS_THE_RESPONSE,
                    timeout_s=LIMIT_S, on_failure=policy, num_workers=2,
                )
            )
            for policy in POLICIES
        }  # fmt: skip


@pytest.fixture
def pool(pools: dict[str, RewardPool]) -> RewardPool:
    return pools["zero"]


def policy_of(pool: RewardPool) -> str:
    return pool.config.on_failure


def failed_of(group: RolloutGroup) -> list[bool]:
    assert group.score_failed_N is not None
    return group.score_failed_N.tolist()


def check_fault(pool: RewardPool, name: str) -> None:
    code, cause, words = FAULTS[name]
    groups = [group_of("value = 1", code, "value = 3"), group_of("value = 4")]
    if policy_of(pool) == "raise":
        with pytest.raises(UserError) as caught:
            pool.score_now(groups)
        sentence = str(caught.value)
        assert 'reward.on_failure = "zero" or "drop"' in sentence
    else:
        found = pool.score_now(groups)
        kept = [1.0, 0.0, 3.0] if policy_of(pool) == "zero" else [1.0, 3.0]
        assert [rewards_of(group) for group in found.groups] == [kept, [4.0]]
        if policy_of(pool) == "drop":
            assert [response.text for response in found.groups[0].responses] == ["value = 1", "value = 3"]
        failed = [False, True, False] if policy_of(pool) == "zero" else [False, False]
        assert [failed_of(group) for group in found.groups] == [failed, [False]]
        assert found.failures.counts == {cause: 1}
        assert found.failures.num_dropped == (policy_of(pool) == "drop")
        assert found.metrics()[f"reward_failures_{cause}"] == found.metrics()["reward_failures"] == 1
        (sentence,) = found.failures.examples
        assert sentence in found.warnings()["failed rewards"]
    assert "reward \"python:mine.py:score\" of prompt 'rows.jsonl:7', response 1," in sentence
    assert len(sentence) < 1200
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_a_fault_is_handled_by_policy_and_counted(pools: dict[str, RewardPool], policy: str, name: str):
    """verl#6673, verl#288, InternBootcamp#15, SvS#3; miles#1012, where the errors were swallowed."""
    started = time.monotonic()
    check_fault(pools[policy], name)
    assert time.monotonic() - started < 30
    assert rewards_of(pools[policy].score_now([group_of("value = 5")]).groups[0]) == [5.0], "the pool goes on"


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_every_fault_time_and_again(pools: dict[str, RewardPool], policy: str):
    for _ in range(3):
        for name in FAULTS:
            check_fault(pools[policy], name)


@pytest.mark.parametrize("code", [FORK_AND_RETURN, FORK_AND_STAY])
def test_a_function_that_forks_scores_once(pool: RewardPool, code: str):
    found = pool.score_now([group_of(code, "value = 2", code)])
    assert rewards_of(found.groups[0]) == [1.0, 2.0, 1.0]
    assert found.failures.num_failures == 0


def test_printing_neither_blocks_nor_corrupts(pool: RewardPool, capfd: pytest.CaptureFixture[str]):
    code = (
        "import os\nfor _ in range(200): os.write(1, b'spam\\n' * 10_000); os.write(2, b'eggs')\nprint('x')\nvalue = 1"
    )
    assert rewards_of(pool.score_now([group_of(code, "value = 2")]).groups[0]) == [1.0, 2.0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.full
def test_a_gigabyte_is_dropped_and_the_end_is_kept(tmp_path: Path):
    code = "import os\nfor _ in range(1000): os.write(1, b'x' * 999_999 + b'\\n')\nprint('the end')\nos._exit(1)"
    with open_pool(tmp_path, RUNS_THE_RESPONSE, timeout_s=120, on_failure="zero") as pool:
        before = psutil.Process().memory_info().rss
        found = pool.score_now([group_of("value = 1", code)])
        assert psutil.Process().memory_info().rss - before < 100e6
    assert found.failures.counts == {Cause.DIED: 1}
    assert "(it last printed: the end)" in found.failures.examples[0]


def test_what_a_call_leaves_behind_does_not_reach_the_next(pool: RewardPool):
    """A changed folder and an alarm: both end with the call that made them."""
    leave = (
        "import os, signal\nos.chdir('/')\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\nsignal.alarm(1)\nvalue = 1"
    )
    look = "import os, time\ntime.sleep(0.05)\nvalue = len(os.getcwd()) > 1"
    assert rewards_of(pool.score_now([group_of(leave, look, leave, look)]).groups[0]) == [1.0, 1.0, 1.0, 1.0]
    time.sleep(1.1)
    assert rewards_of(pool.score_now([group_of(look)]).groups[0]) == [1.0]


def test_several_components_fail_by_themselves(tmp_path: Path):
    """Under "zero" a component that fails counts 0 and the others stand; under "drop" the response goes once."""
    source = RUNS_THE_RESPONSE + "\ndef half(response):\n    return 0.5 if 'value' in response else 1 / 0\n"
    components = [{"function": "python:mine.py:score", "weight": 2}, {"function": "python:mine.py:half"}]
    groups = [group_of("value = 1", "value = None", "1 / 0"), group_of("1 / 0")]
    with open_pool(tmp_path, source, components=components, on_failure="zero") as pool:
        found = pool.score_now(groups)
    assert [rewards_of(group) for group in found.groups] == [[2.5, 0.5, 0.0], [0.0]]
    assert found.failures.counts == {Cause.RAISED: 4, Cause.INVALID: 1}
    assert len(found.failures.examples) == 3
    with open_pool(tmp_path, source, components=components, on_failure="drop") as pool:
        found = pool.score_now(groups)
    assert [rewards_of(group) for group in found.groups] == [[2.5], []]
    assert found.groups[0].reward_components["half"].tolist() == [0.5]
    assert found.metrics()["reward_dropped"] == 3
    assert found.metrics()["reward_half_mean"] == 0.5


@pytest.mark.parametrize(
    ("value", "cause", "words"),
    [
        ("[1.0] * (len(responses) - 1)", Cause.WRONG_COUNT, "returned 2 numbers for 3 responses"),
        ("[1.0] * 4", Cause.WRONG_COUNT, "returned 4 numbers for 3"),
        ("1.0", Cause.WRONG_COUNT, "returned 1.0 for 3"),
        ("None", Cause.WRONG_COUNT, "returned None for 3"),
        ("'123'", Cause.WRONG_COUNT, "returned '123' for 3"),
        ("{0: 1, 1: 1, 2: 1}", Cause.WRONG_COUNT, "returned {0: 1"),
        ("(1.0 for _ in responses)", Cause.WRONG_COUNT, "returned <generator"),
        ("__import__('numpy').ones((3, 1))", Cause.WRONG_COUNT, "returned array"),
        ("__import__('numpy').array(1.0)", Cause.WRONG_COUNT, "returned array"),
        ("1 / 0", Cause.RAISED, "ZeroDivisionError"),
        ("__import__('time').sleep(100)", Cause.TIMEOUT, "did not return"),
        ("__import__('os')._exit(1)", Cause.DIED, "exit status 1"),
    ],
)
def test_a_batch_fails_as_a_whole(tmp_path: Path, value: str, cause: Cause, words: str):
    source = f"def score(responses):\n    return {value} if responses[0] == 'bad' else [2] * len(responses)\n"
    with open_pool(tmp_path, source, on_failure="zero", timeout_s=0.2) as pool:
        found = pool.score_now([group_of("a"), group_of("bad", "b", "c"), group_of("d", "e")])
    assert [rewards_of(group) for group in found.groups] == [[2], [0, 0, 0], [2, 2]]
    assert found.failures.counts == {cause: 3}
    assert words in found.failures.examples[0]


def test_one_bad_number_of_a_batch_fails_alone(tmp_path: Path):
    source = "def score(responses):\n    return [1, float('nan'), 3]\n"
    with open_pool(tmp_path, source, on_failure="drop") as pool:
        found = pool.score_now([group_of("a", "b", "c")])
    assert rewards_of(found.groups[0]) == [1, 3]
    assert found.failures.counts == {Cause.INVALID: 1}


def test_coroutines_fail_by_themselves(tmp_path: Path):
    """Those of one worker run at once: one that hangs, blocks the loop or kills the worker takes no other with it."""
    source = (
        "import asyncio, os, time\n"
        "async def score(response):\n"
        "    await asyncio.sleep(0.01)\n"
        "    if response == 'hang': await asyncio.sleep(1000)\n"
        "    if response == 'cling':\n"
        "        while True:\n"
        "            try: await asyncio.sleep(1000)\n"
        "            except asyncio.CancelledError: pass\n"
        "    if response == 'block': time.sleep(1000)\n"
        "    if response == 'die': os._exit(3)\n"
        "    if response == 'exit': raise SystemExit(4)\n"
        "    return 1\n"
    )
    texts = ["ok", "hang", "ok", "cling", "exit", "ok", "block", "die", "ok"]
    with open_pool(tmp_path, source, on_failure="zero", timeout_s=0.5) as pool:
        found = pool.score_now([group_of(*texts)])
    assert rewards_of(found.groups[0]) == [float(text == "ok") for text in texts]
    assert found.failures.counts == {Cause.TIMEOUT: 3, Cause.RAISED: 1, Cause.DIED: 1}


def test_coroutines_are_not_charged_for_each_others_time(tmp_path: Path):
    """Twenty that each compute for a tenth of the limit keep one event loop for twice the limit: none is late."""
    source = (
        "import asyncio, time\n"
        "async def score(response):\n"
        "    for _ in range(4):\n"
        "        time.sleep(0.0225)\n"
        "        await asyncio.sleep(0)\n"
        "    return 1\n"
    )
    with open_pool(tmp_path, source, on_failure="zero", timeout_s=0.9) as pool:
        found = pool.score_now([group_of(*["ok"] * 20)])
    assert found.failures.counts == {}
    assert rewards_of(found.groups[0]) == [1.0] * 20


@pytest.mark.parametrize("reading", ["0", "float('nan')", "'noon'"])
def test_a_clock_that_the_function_replaces_is_its_own(tmp_path: Path, reading: str):
    source = f"import time\ntime.perf_counter = lambda: {reading}\ndef score(response): return 1\n"
    with open_pool(tmp_path, source) as pool:
        assert scored(pool, "a", "b") == [1.0, 1.0]


def hangs(count: int, share: float) -> tuple[list[RolloutGroup], int]:
    rng = np.random.default_rng(0)
    is_hang = np.zeros(count, bool)
    is_hang[rng.permutation(count)[: round(count * share)]] = True
    texts = ["while True: pass" if bad else "value = 1" for bad in is_hang]
    return [group_of(*texts[start : start + 8]) for start in range(0, count, 8)], int(is_hang.sum())


def check_hangs(folder: Path, *, count: int, limit_s: float, num_workers: int) -> None:
    groups, num_hangs = hangs(count, 0.05)
    with open_pool(folder, RUNS_THE_RESPONSE, on_failure="zero", timeout_s=limit_s, num_workers=num_workers) as pool:
        pool.check([])
        started = time.monotonic()
        found = pool.score_now(groups)
        seconds = time.monotonic() - started
    assert found.failures.counts == {Cause.TIMEOUT: num_hangs}
    assert sum(sum(rewards_of(group)) for group in found.groups) == count - num_hangs
    waves = math.ceil(num_hangs / num_workers)
    assert waves * limit_s * 0.9 < seconds < waves * (limit_s + 0.4) + 5, f"{num_hangs} hangs took {seconds:.1f} s"


def test_hangs_cost_what_the_limit_predicts(tmp_path: Path):
    """verl#6673: of 160 calls 8 never return. miles#1012: a few of them held the slots for hours. axolotl#3516: one
    limit for all of them together would be over long before the end."""
    check_hangs(tmp_path, count=160, limit_s=0.5, num_workers=2)


@pytest.mark.full
def test_a_thousand_calls_with_hangs_cost_what_the_limit_predicts(tmp_path: Path):
    """verl#6673: of 1,000 calls 50 never return."""
    check_hangs(tmp_path, count=1000, limit_s=1.0, num_workers=2)
