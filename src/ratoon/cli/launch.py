"""The ranks of a run on this host: started, told of signals, and ended together."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ratoon.cli.complaint import complain
from ratoon.trainer.config import TrainerConfig
from ratoon.types.errors import UserError

_POLL_S = 0.05
_GRACE_S = 30.0
"""For the other ranks once one has failed: what they wait for will not come, and they may have something to write."""

_AT_ONCE_S = 10.0
"""For all ranks after a second Ctrl-C."""

_PR_SET_PDEATHSIG = 1

_HELD_FD = "RATOON_HELD_COMPLAINTS_FD"
"""Set for ranks that `run_ranks` starts: where they write what they would say of another rank's failure."""

_MAX_HELD_BYTES = 4095
"""Of a line: a pipe takes this much at once, so that lines of several ranks do not mix."""

_MAX_PIPE_BYTES = 1 << 16


def is_a_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or `run_ranks`, has started this process."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def is_first_of_host(environment: Mapping[str, str] = os.environ) -> bool:
    """Of the ranks of one host, which read the same files, one complains of what is in them."""
    return environment.get("LOCAL_RANK", "0") == "0"


def leave_to_launcher(message: object, environment: Mapping[str, str] = os.environ) -> bool:
    """Hands what a rank would say of a failure that began in another one to `run_ranks`, which says it where no rank
    has a cause of its own. False where `run_ranks` has not started this process."""
    if _HELD_FD not in environment:
        return False
    line = f"{environment['RANK']} {' '.join(str(message).splitlines())}".encode(errors="replace")
    try:
        os.write(int(environment[_HELD_FD]), line[:_MAX_HELD_BYTES] + b"\n")
    except OSError:
        return False
    return True


def num_ranks(config: TrainerConfig) -> int:
    """How many processes `config` asks for on this host. Raises UserError where there are fewer GPUs than that."""
    if config.device == "cpu" or config.num_processes == 1:
        return 1 if config.num_processes == "auto" else config.num_processes
    import torch  # seconds; a run of one process imports it in any case

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        # One process says that "cuda" cannot be had.
        return 1 if config.num_processes == "auto" or config.device == "cuda" else config.num_processes
    if config.num_processes == "auto":
        return num_gpus
    if config.num_processes > num_gpus:
        raise UserError(
            f"trainer.num_processes = {config.num_processes}, but this host shows {num_gpus} GPUs, and each process "
            'needs one of its own; set it to "auto" or to fewer, or look at CUDA_VISIBLE_DEVICES'
        )
    return config.num_processes


def run_ranks(program: Sequence[str], count: int) -> int:
    """Runs `program` in `count` processes that know one another. Returns the exit status of the run.

    That of the first rank that failed by itself, else rank 0's. One that was killed is named on standard error; where
    ranks have only lost another one, which hangs, what one of them left (`leave_to_launcher`) stands there. SIGINT and
    SIGTERM reach every rank. Where one fails the others end too, within half a minute; on Linux none outlives this
    process, however it ends.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)  # where many ranks have filled it, the next one speaks for itself
    start = _environment(count) | {_HELD_FD: str(write_fd)}
    try:
        ranks = [
            _start(program, start | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, keeps_fd=write_fd)
            for rank in range(count)
        ]
        try:
            with _forwarded_signals(ranks) as received:
                failed = _wait(ranks, received)
        finally:
            _kill(ranks)
        held = _held_complaints(read_fd)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    if not failed:
        return ranks[0].returncode
    causes = [rank for rank in failed if rank not in held]
    if not causes:
        complain("train", held[min(held)])
        return 1
    return _told(causes[0], ranks, received)


def _told(failed: int, ranks: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> int:
    """The exit status of a run that this rank has ended, which is named here if it could not say why itself."""
    status = ranks[failed].returncode
    if status > 0:
        return status
    if len(received) > 1 or -status in received:  # told to stop at once; or before it could do so in order
        return 128 + received[-1]
    name = signal.Signals(-status).name
    complain(
        "train",
        f"rank {failed} of {len(ranks)} was ended by {name}, and the others with it"
        + ("; if nobody killed it, the host ran out of memory" if -status == signal.SIGKILL else "")
        + ". The same command goes on from the last checkpoint",
    )
    return 1


def _held_complaints(read_fd: int) -> dict[int, str]:
    """By rank. None of them writes any more."""
    os.set_blocking(read_fd, False)  # a process that a rank has started may hold the other end open
    try:
        written = os.read(read_fd, _MAX_PIPE_BYTES)
    except BlockingIOError:
        return {}
    lines = (line.split(maxsplit=1) for line in written.decode(errors="replace").splitlines())
    return {int(rank): message for rank, message in lines}


def _environment(count: int) -> dict[str, str]:
    threads = max((os.cpu_count() or 1) // count, 1)
    return {
        # Both where the user has not said so. Each rank would take all cores; and what torch's C++ would print beside
        # our own line is in run.log, in the traceback of the error that it raises as well.
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(program: Sequence[str], environment: Mapping[str, str], *, keeps_fd: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        program,
        env=environment,
        pass_fds=(keeps_fd,),
        stdin=subprocess.DEVNULL,
        # A terminal's Ctrl-C comes to this process alone, which passes it on once.
        process_group=0,
        preexec_fn=_dies_with_parent(),
    )


def _dies_with_parent() -> Callable[[], None] | None:
    """What a child calls before it becomes another program, so that the kernel ends it with this process."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(1)

    return tie


@contextmanager
def _forwarded_signals(ranks: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM go to every rank. Yields those that came so far."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for rank in ranks:
            if rank.returncode is None:
                rank.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> list[int]:
    """Until all have ended, or must be killed. Ranks that failed, in the order they were seen to; none where all ended
    as a run may end."""
    failed: list[int] = []
    deadline = float("inf")
    while time.monotonic() < deadline:
        is_over = all(rank.poll() is not None for rank in ranks)
        failed += [number for number, rank in enumerate(ranks) if _has_failed(rank) and number not in failed]
        if is_over:
            return failed
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(received) > 1:
            deadline = min(deadline, time.monotonic() + _AT_ONCE_S)
        time.sleep(_POLL_S)
    if not failed:
        failed = [number for number, rank in enumerate(ranks) if rank.returncode is None]
        _kill(ranks)
    return failed


def _has_failed(rank: "subprocess.Popen[bytes]") -> bool:
    """Not complete, stopped by a rule (3) or by a signal that it was told of (130, 143)."""
    return rank.poll() is not None and rank.returncode not in (0, 3, 130, 143)


def _kill(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()
