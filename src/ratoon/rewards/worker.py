"""The process that runs reward functions. The run kills it when a function takes too long.

It imports neither torch nor NumPy nor pydantic: a hang costs the start of a fresh worker.
"""

from __future__ import annotations

import faulthandler
import inspect
import io
import json
import os
import pickle
import resource
import select
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter  # its own name: a function may put a clock of its own into the module
from typing import TYPE_CHECKING, Any

from ratoon.data.rows import short_repr
from ratoon.data.user_function import python_target
from ratoon.rewards import components as kinds
from ratoon.rewards.checks import checked_reward
from ratoon.rewards.components import ComponentSpec, PromptText, place_of
from ratoon.rewards.messages import (
    OK,
    REFUSED,
    UNREADABLE,
    WHERE_SIGNAL,
    Cause,
    Chunk,
    ComponentKind,
    Orders,
    Outcome,
    WorkerCall,
    read_frame,
)
from ratoon.rewards.python_function import PythonScorer, load_scorer
from ratoon.rewards.scorers import (
    ExactMatch,
    Format,
    GivenUpError,
    ReasoningGym,
    Regex,
    Scorer,
    UnreadableError,
    cause,
)
from ratoon.types.errors import UserError

if TYPE_CHECKING:
    from ratoon.rewards.awaiting import Awaiter

_PR_SET_CHILD_SUBREAPER = 36


def main(request_fd: int, reply_fd: int, lifeline_fd: int) -> None:
    """Serves until the run closes the request pipe, and ends without waiting for threads of the functions."""
    _die_with_the_run(lifeline_fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a function prints must not make it fail, nor be lost with it
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL, all_threads=False, chain=False)
    status = 0
    try:
        _Worker(request_fd, reply_fd).serve()
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        status = 70
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _die_with_the_run(lifeline_fd: int) -> None:
    """The kernel kills this process group when the run's end of the lifeline closes, as it does by any death.

    No parent-death signal besides: it comes as soon as one thread of the run has ended, kills this process alone, and
    with it the lifeline that what it started hangs on.
    """
    if sys.platform != "linux":
        return  # the end of the request pipe stops a worker that is idle
    import ctypes
    import fcntl

    ctypes.CDLL(None).prctl(
        _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # daemons of a function stay where the run can find them
    with suppress(OSError):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    lifeline = select.poll()
    lifeline.register(lifeline_fd, 0)
    if lifeline.poll(0):  # hung up before anybody watched it: the run ended while this interpreter started
        os._exit(0)
    with suppress(OSError):  # out of memory, the kernel shall choose a worker and not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")


class _Worker:
    """Reads calls, makes them, and reports on each as it returns."""

    def __init__(self, request_fd: int, reply_fd: int) -> None:
        self._request_fd = request_fd
        self._reply_fd = reply_fd
        self._pid = os.getpid()
        self._folder = os.getcwd()
        self._loop: Awaiter | None = None
        self._scorers: list[Scorer] = []
        self._functions: list[str] = []

    def serve(self) -> None:
        orders: Orders = read_frame(self._request_fd)
        if orders.max_memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (orders.max_memory_bytes, orders.max_memory_bytes))
        try:
            self._scorers = [build_scorer(spec, orders) for spec in orders.specs]
        except UserError as error:
            self._say([REFUSED, str(error)])
            return
        self._functions = [spec.function for spec in orders.specs]
        self._say(["ready", [asdict(_kind_of(scorer)) for scorer in self._scorers]])
        while True:
            chunk: Chunk = read_frame(self._request_fd)
            if chunk.is_concurrent:
                self._awaiter().call_all(chunk.calls, self._start, self._finish)
            else:
                for call in chunk.calls:
                    self._call(call)

    def _say(self, message: object) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a function forked, and this is its child, which came back here too
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._reply_fd, line) :]

    def _call(self, call: WorkerCall) -> None:
        started = perf_counter()
        value = self._start(call)
        if inspect.isawaitable(value):
            value = self._awaiter().value_of(value)
        self._finish(call, value, perf_counter() - started)

    def _start(self, call: WorkerCall) -> Any:
        """What the function returns, perhaps an awaitable; an exception that it raises is returned too."""
        scorer = self._scorers[call.component]
        try:
            if not call.responses:
                return [scorer.check(pickle.loads(prompt)) for prompt in pickle.loads(call.prompt)]
            prompt: PromptText = pickle.loads(call.prompt)
            scorer.check(prompt)
        except UserError as error:
            return _Refusal(str(error))
        except BaseException as error:
            return error
        try:
            return scorer(prompt, list(call.responses) if scorer.is_batch else call.responses[0])
        except BaseException as error:  # exit() and asyncio.CancelledError too
            return error

    def _finish(self, call: WorkerCall, value: Any, seconds: float) -> None:
        with suppress(Exception):  # an unfinished line too
            sys.stdout.flush()
        self._say([call.id, seconds, self._outcomes(call, value)])
        signal.setitimer(signal.ITIMER_REAL, 0)  # no alarm and no change of folder outlives its call
        with suppress(OSError):
            os.chdir(self._folder)

    def _outcomes(self, call: WorkerCall, value: Any) -> list[Outcome]:
        count = max(len(call.responses), 1)
        if isinstance(value, _Refusal):
            return [(REFUSED, value.message)] * count
        if not call.responses:  # the check of a prompt
            return [(REFUSED, cause(value)) if isinstance(value, BaseException) else (OK, 0.0)]
        function = self._functions[call.component]
        places = [place_of(function, pickle.loads(call.prompt).id, index) for index in call.response_indices]
        if isinstance(value, GivenUpError):
            return [(Cause.TIMEOUT, "")] * count
        if isinstance(value, UnreadableError):
            return [(UNREADABLE, f"{places[0]} could not be read and scores 0: {value}")]
        if isinstance(value, BaseException):
            return [(Cause.RAISED, f"{place} failed: {cause(value)}") for place in places]
        if not self._scorers[call.component].is_batch:
            return [_outcome(value, places[0])]
        values = _listed(value)
        if values is None or len(values) != count:
            got = short_repr(value)[:60] if values is None else f"{len(values)} numbers"
            sentence = f"returned {got} for {count} responses; a function of `responses` returns a list of one for each"
            return [(Cause.WRONG_COUNT, f"{place} {sentence}") for place in places]
        return [_outcome(value, place) for value, place in zip(values, places, strict=True)]

    def _awaiter(self) -> Awaiter:
        if self._loop is None:
            from ratoon.rewards.awaiting import Awaiter

            self._loop = Awaiter()
        return self._loop


def _kind_of(scorer: Scorer) -> ComponentKind:
    if isinstance(scorer, PythonScorer):
        return scorer.kind
    return ComponentKind(is_batch=scorer.is_batch, is_async=scorer.is_async)


class _Refusal:
    def __init__(self, message: str) -> None:
        self.message = message


def _outcome(value: object, place: str) -> Outcome:
    try:
        return OK, checked_reward(value, place)
    except UserError as error:
        return Cause.INVALID, str(error)
    except Exception as error:  # the value is of the function's making: so may its methods be
        return Cause.INVALID, f"{place} is a {type(value).__name__} that cannot be read as a number: {cause(error)}"


def _listed(value: Any) -> list[Any] | None:
    """The values of a list, tuple or 1-D NumPy array; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim == 1:
        return list(value)
    return None


def build_scorer(spec: ComponentSpec, orders: Orders) -> Scorer:
    """Raises UserError when what it needs cannot be had."""
    target = python_target(spec.function)
    if target is not None:
        return load_scorer(*target, base_dir=Path(orders.base_dir), key=spec.key)
    match spec.function:
        case kinds.REASONING_GYM:
            return ReasoningGym(spec)
        case kinds.EXACT_MATCH:
            return ExactMatch(spec)
        case kinds.MATH_VERIFY:
            from ratoon.rewards.mathematics import MathVerify

            return MathVerify(spec, timeout_s=orders.timeout_s)
        case kinds.REGEX:
            return Regex(spec)
        case kinds.FORMAT:
            return Format(spec)
    raise AssertionError(f"no worker scores {spec.function!r}")
