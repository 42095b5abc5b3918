"""A thread that hands calls to worker processes, ends those that take too long, and starts others in their place."""

import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ratoon.rewards.messages import OK, UNREADABLE, Cause, Chunk, ComponentKind, Orders, Outcome, WorkerCall, to_frame
from ratoon.rewards.output_log import OutputLog
from ratoon.rewards.worker_process import WorkerProcess
from ratoon.types.errors import UserError

_MAX_CHUNK = 32
_CHUNK_S = 0.05
"""About how long a worker may be busy with what it was sent at once: enough to hide the sending."""

_FIRST_CALL_S = 0.01
"""What a call is taken to last until some have been made."""
_MAX_CONCURRENT = 64
_GRACE_S = 1.0
"""Beyond its limit, for a worker of coroutines to give them up by itself."""

_WHERE_S = 0.05
"""For a worker to write its stack, before it is killed."""

_CHECK_EVERY_S = 0.1
"""A death shows at once by the end of the replies, unless a child of the worker holds them open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a scheduler is to run, and within which limits."""

    orders: Orders
    files: tuple[str | None, ...]
    """For each component, the user's file."""

    num_workers: int
    timeout_s: float
    start_timeout_s: float


class Job:
    """Calls that were submitted together, and what has become of them."""

    def __init__(self, calls: Sequence[WorkerCall], *, stops_at_failure: bool) -> None:
        """The calls' ids are unique among all jobs of a scheduler."""
        self.calls = calls
        self.stops_at_failure = stops_at_failure
        self.outcomes: dict[int, list[Outcome]] = {}
        """By call id; without those that were not made because another one failed."""
        self.future: Future[Job] = Future()
        """Itself, when it is done."""

    def settle(self, call_id: int, outcomes: list[Outcome]) -> None:
        if self.future.done() or call_id in self.outcomes:
            return
        self.outcomes[call_id] = outcomes
        has_failed = any(status not in (OK, UNREADABLE) for status, _ in outcomes)
        if len(self.outcomes) == len(self.calls) or (has_failed and self.stops_at_failure):
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        with suppress(Exception):  # cancelled in this very moment
            if error is None:
                self.future.set_result(self)
            else:
                self.future.set_exception(error)


class Scheduler:
    """Owns worker processes. Everything but `submit` and `close` runs on one thread of its own."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.kinds: Future[tuple[ComponentKind, ...]] = Future()
        """Of the components, once a worker has loaded them; or the UserError that says why none can."""
        self.output = OutputLog()
        """What workers print."""
        self.kinds.set_running_or_notify_cancel()
        self._config = config
        self._orders = to_frame(config.orders)
        self._inbox: deque[Job] = deque()
        self._lock = threading.Lock()
        """Held to add to the inbox, and to close it."""
        self._queue: deque[WorkerCall] = deque()
        self._alone: set[int] = set()
        """Calls to be made by themselves: each was under way with others when their worker died or hung."""
        self._jobs: dict[int, Job] = {}
        """By call id."""
        self._workers: list[WorkerProcess] = []
        self._call_s = [_FIRST_CALL_S] * len(config.files)
        """For each component, how long its calls take, the latest counting most."""
        self._start_s = 0.5
        """How long the last start took."""
        self._num_idle_deaths = 0
        self._failure: BaseException | None = None
        self._is_closing = False
        self._has_ended = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, partial(os.read, self._wake_read, 1 << 16))
        self._thread = threading.Thread(target=self._run, name="reward workers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Its future resolves when all its calls are made, or ends with what keeps them from being made."""
        if not job.calls:
            job.end(None)
            return
        with self._lock:
            if not self._has_ended:
                self._inbox.append(job)
                self._wake()
                return
        job.end(self._failure or RuntimeError("the reward workers are closed"))

    def close(self) -> None:
        """Kills the workers and whatever they started. Idempotent."""
        with self._lock:
            self._is_closing = True
            if not self._has_ended:
                self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """The lock must be held: the pipe is closed after the inbox."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _run(self) -> None:
        try:
            while not self._is_closing and self._failure is None:
                self._take_jobs()
                self._keep_workers()
                self._dispatch()
                for key, _ in self._selector.select(self._patience_s()):
                    key.data()
                for worker in [*self._workers]:
                    self._judge(worker)
        except BaseException as error:
            self._failure = error
        error = self._failure or RuntimeError("the reward workers were closed before all was scored")
        with self._lock:
            self._has_ended = True
        for worker in [*self._workers]:
            self._remove(worker)
        if not self.kinds.done():
            self.kinds.set_exception(error)
        for job in {*self._jobs.values(), *self._inbox}:
            job.end(error)
        self._selector.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def _take_jobs(self) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            self._jobs.update((call.id, job) for call in job.calls)
            self._queue.extend(job.calls)

    def _keep_workers(self) -> None:
        """As many as there ought to be, and one more for each that is about to be killed."""
        now = time.monotonic()
        wanted = self._config.num_workers + sum(now >= self._spare_at(worker) for worker in self._workers)
        while len(self._workers) < wanted:
            worker = WorkerProcess(self._orders, self.output)
            self._workers.append(worker)
            self._selector.register(worker.reply_fd, selectors.EVENT_READ, partial(self._hear, worker))
            self._selector.register(worker.output_fd, selectors.EVENT_READ, partial(self._read_output, worker))
            self._watch_sending(worker)
        for worker in [worker for worker in self._workers if worker.is_idle][: len(self._workers) - wanted]:
            self._remove(worker)

    def _dispatch(self) -> None:
        for worker in self._workers:
            if not worker.is_idle:
                continue
            chunk = self._next_chunk()
            if not chunk:
                return
            is_concurrent = self._is_async(chunk[0])
            worker.ask(Chunk(chunk, is_concurrent), chunk, is_concurrent=is_concurrent)
            self._watch_sending(worker)

    def _next_chunk(self) -> tuple[WorkerCall, ...]:
        """Calls of one kind from the queue's head: fewer towards the end, so that no worker has the last word."""
        chunk: list[WorkerCall] = []
        size = 1
        while self._queue and len(chunk) < size:
            call = self._queue[0]
            if self._jobs[call.id].future.done():  # failed or cancelled
                self._queue.popleft()
                del self._jobs[call.id]
                continue
            if not chunk:
                size = self._chunk_size(call)
            elif self._is_async(call) != self._is_async(chunk[0]) or call.id in self._alone:
                break
            chunk.append(self._queue.popleft())
        return tuple(chunk)

    def _chunk_size(self, first: WorkerCall) -> int:
        if first.id in self._alone:
            return 1
        share = -(-len(self._queue) // self._config.num_workers)
        if self._is_async(first):
            return min(share, _MAX_CONCURRENT)
        return max(1, min(share // 2, _MAX_CHUNK, int(_CHUNK_S / max(self._call_s[first.component], 1e-6))))

    def _is_async(self, call: WorkerCall) -> bool:
        return self.kinds.result()[call.component].is_async and bool(call.responses)

    def _watch_sending(self, worker: WorkerProcess) -> None:
        """Calls `send` whenever the pipe has room, as long as there is something to send."""
        is_watched = worker.request_fd in self._selector.get_map()
        if worker.has_more_to_send and not is_watched:
            self._selector.register(worker.request_fd, selectors.EVENT_WRITE, partial(self._send, worker))
        elif is_watched and not worker.has_more_to_send:
            self._selector.unregister(worker.request_fd)

    def _send(self, worker: WorkerProcess) -> None:
        worker.send()
        self._watch_sending(worker)

    def _read_output(self, worker: WorkerProcess) -> None:
        if not worker.read_output():
            self._selector.unregister(worker.output_fd)

    def _hear(self, worker: WorkerProcess) -> None:
        for reply in worker.replies():
            match reply:
                case ["ready", list() as kinds] if not worker.is_ready:
                    self._greet(worker, kinds)
                case ["refused", str() as message] if not worker.is_ready:
                    self._fail(message + self._under_limit())
                case [int() as call_id, float() as seconds, list() as outcomes] if math.isfinite(seconds):
                    self._take_answer(worker, call_id, seconds, outcomes)
                case _:
                    worker.refuse()

    def _greet(self, worker: WorkerProcess, kinds: list[dict[str, Any]]) -> None:
        worker.is_ready = True
        self._start_s = time.monotonic() - worker.started_at
        if not self.kinds.done():
            named = [{**kind, "required": tuple(kind["required"]), "always": tuple(kind["always"])} for kind in kinds]
            self.kinds.set_result(tuple(ComponentKind(**kind) for kind in named))

    def _take_answer(self, worker: WorkerProcess, call_id: int, seconds: float, outcomes: list[Any]) -> None:
        call = next((call for call in worker.calls if call.id == call_id), None)
        if call is None or len(outcomes) != max(len(call.responses), 1):
            worker.refuse()
            return
        worker.calls.remove(call)
        worker.busy_since = worker.busy_since if worker.is_concurrent else time.monotonic()
        self._call_s[call.component] += (seconds - self._call_s[call.component]) / 10
        self._num_idle_deaths = 0
        if seconds > call.limit_s:  # it came back while it was to be killed, or the run was slow to look
            self._settle(call, Cause.TIMEOUT, "")
        else:
            self._alone.discard(call_id)
            job = self._jobs.pop(call_id, None)
            if job is not None:
                job.settle(call_id, [(str(status), value) for status, value in outcomes])

    def _settle(self, call: WorkerCall, cause: Cause, sentence: str) -> None:
        """sentence: what is known here about it; whoever submitted the job knows the rest."""
        self._alone.discard(call.id)
        job = self._jobs.pop(call.id, None)
        if job is not None:
            job.settle(call.id, [(cause, sentence)] * max(len(call.responses), 1))

    def _judge(self, worker: WorkerProcess) -> None:
        """Buries the dead, and ends those whose time is up."""
        is_over = time.monotonic() >= self._deadline(worker)
        if is_over or worker.process.poll() is not None:
            self._hear(worker)  # what it said last counts
        if worker.has_hung_up or worker.process.poll() is not None:
            how = worker.how_it_ended()
            worker.read_output()
            if worker.was_asked_where:  # the question ends a worker that hangs before it can take it
                self._end(worker, Cause.TIMEOUT, "")
            else:
                place, words = worker.place(self._file_of(worker)), worker.last_words()
                at = f" at {place}" if place else ""
                self._end(worker, Cause.DIED, f"{how}{at}" + (f" (it last printed: {words})" if words else ""))
        elif is_over and time.monotonic() >= self._deadline(worker):
            if not worker.was_asked_where:
                worker.ask_where()
            else:
                worker.read_output()
                self._end(worker, Cause.TIMEOUT, worker.place(self._file_of(worker)))

    def _end(self, worker: WorkerProcess, cause: Cause, sentence: str) -> None:
        calls = [*worker.calls]
        self._remove(worker)
        if not worker.is_ready:
            self._fail(self._start_failure(cause, sentence))
        elif not calls:
            self._num_idle_deaths += 1
            if self._num_idle_deaths > 2 * self._config.num_workers:
                self._fail(f"reward workers end between one call and the next: the last {sentence}")
        elif worker.is_concurrent and len(calls) > 1:
            self._alone.update(call.id for call in calls)  # one of them is to blame
            self._queue.extendleft(reversed(calls))
        else:
            self._queue.extendleft(reversed(calls[1:]))
            self._settle(calls[0], cause, sentence)

    def _fail(self, message: str) -> None:
        """Ends everything. The first reason counts: a worker that gives one ends, which is no second."""
        self._failure = self._failure or UserError(message)

    def _start_failure(self, cause: Cause, sentence: str) -> str:
        names = ", ".join(spec.function for spec in self._config.orders.specs)
        key = self._config.orders.specs[0].key
        if cause is Cause.TIMEOUT:
            place = f" (it was at {sentence})" if sentence else ""
            return (
                f"{key}: loading {names} took more than reward.start_timeout_s = {self._config.start_timeout_s:g} s"
                f"{place}; raise the limit, or mend what the file does when it is imported"
            )
        return f"{key}: a reward worker {sentence} while it loaded {names}{self._under_limit()}"

    def _under_limit(self) -> str:
        """How libraries fail for want of memory while they load is as various as they are."""
        num_bytes = self._config.orders.max_memory_bytes
        if num_bytes is None:
            return ""
        return f" (under reward.max_memory_gb = {num_bytes / 1e9:g}, which may be too little to load it: raise it)"

    def _file_of(self, worker: WorkerProcess) -> str | None:
        if worker.calls:
            return self._config.files[worker.calls[0].component]
        return next((file for file in self._config.files if file is not None), None)

    def _remove(self, worker: WorkerProcess) -> None:
        for fd in worker.fds:
            with suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        worker.read_output()  # what it printed last
        worker.kill()
        self._workers.remove(worker)

    def _deadline(self, worker: WorkerProcess) -> float:
        extra_s = _WHERE_S if worker.was_asked_where else 0.0
        if not worker.is_ready:
            return worker.started_at + self._config.start_timeout_s + extra_s
        if not worker.calls:
            return float("inf")
        if not self._is_async(worker.calls[0]):
            return worker.busy_since + worker.calls[0].limit_s + extra_s
        return worker.busy_since + max(call.limit_s for call in worker.calls) + _GRACE_S + extra_s

    def _spare_at(self, worker: WorkerProcess) -> float:
        """When to start another, so that it is ready as this one is killed."""
        if not worker.is_ready or not worker.calls:
            return float("inf")
        limit_s = worker.calls[0].limit_s
        return self._deadline(worker) - min(limit_s / 2, 1.5 * self._start_s)

    def _patience_s(self) -> float | None:
        now = time.monotonic()
        moments = [self._deadline(worker) for worker in self._workers]
        moments += [at for worker in self._workers if (at := self._spare_at(worker)) > now]
        if any(not worker.is_idle for worker in self._workers):
            moments.append(now + _CHECK_EVERY_S)
        soonest = min(moments, default=float("inf"))
        return None if soonest == float("inf") else max(soonest - now, 0.0)
