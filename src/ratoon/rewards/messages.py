"""What the run and its reward workers say to each other. Imported by workers: the standard library only.

To a worker: frames, each an 8-byte length and a pickle. First `Orders`, then `Chunk`s.
From a worker: JSON texts, one a line. First `["ready", [ComponentKind, ...]]` or `["refused", message]`, then for each
call `[call_id, seconds, [outcome, ...]]` with one outcome for each of its responses.
"""

import os
import pickle
import signal
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ratoon.rewards.components import ComponentSpec

WHERE_SIGNAL = signal.SIGUSR2
"""Makes a worker write its Python stack to its standard error, whatever it is doing."""

_LENGTH = struct.Struct("!Q")


class Cause(StrEnum):
    """Why a response has no score."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    DIED = "died"
    """Its worker process ended: by a signal, by exit, by closing the pipes to the run."""

    INVALID = "invalid"
    """The function returned what is no finite number of sane size."""

    WRONG_COUNT = "wrong_count"
    """A batch function did not return one number for each response."""


OK = "ok"
UNREADABLE = "unreadable"
"""Scored 0, because a verifier could not make sense of the response."""

REFUSED = "refused"
"""The prompt lacks what the function needs: no policy helps, the run ends."""

Outcome = tuple[str, float | str]
"""("ok", score), or what went wrong (a Cause, "unreadable" or "refused") and a sentence about it."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is for."""

    specs: tuple[ComponentSpec, ...]
    base_dir: str
    timeout_s: float
    max_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentKind:
    """How a component is called."""

    is_batch: bool
    is_async: bool

    label: str = ""
    """Of a Python function, for messages."""

    required: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    """Of a Python function: the parameters without default, and those that every prompt fills."""


class WorkerCall(NamedTuple):  # pickles faster than a dataclass, and there are many
    """One call of one component: of a response, or for a batch function of all responses of a prompt."""

    id: int
    component: int
    prompt: bytes
    """A pickled PromptText: each call unpickles a copy of its own."""

    responses: tuple[str, ...]
    """Empty to check prompts only; `prompt` then is a pickled list of pickled ones."""

    response_indices: tuple[int, ...]
    limit_s: float


class Chunk(NamedTuple):
    """Calls to make, one after another or all at once."""

    calls: tuple[WorkerCall, ...]
    is_concurrent: bool


def to_frame(message: Any) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


def read_frame(fd: int) -> Any:
    """The next message on a blocking pipe; EOFError when the other end is closed."""
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))
    return pickle.loads(_read_exactly(fd, length))


def _read_exactly(fd: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(fd, min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
