"""The server of a run: attached to or started, given weights, and started again where the recipe says so."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ratoon.rollout.engines.http.config import ServerConfig
from ratoon.rollout.engines.http.process import ServerProcess, describe_exit, free_port
from ratoon.rollout.engines.http.protocol import Listing, ServerFacts, ServerProtocol
from ratoon.rollout.engines.http.sglang import SglangListing, SglangServer
from ratoon.rollout.engines.http.transport import Transport
from ratoon.rollout.engines.http.vllm import VllmListing, VllmServer
from ratoon.rollout.engines.http.weight_files import WeightFolders
from ratoon.rollout.errors import RolloutError
from ratoon.types import UserError

_HOST = "127.0.0.1"
_MODEL_NAME = "policy"
_POLL_S = 0.2
_UNHEALTHY_S = 10.0
"""A server that is neither gone nor healthy for so long is given up."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What is particular to one kind of server."""

    name: str
    protocol: Callable[[Transport], ServerProtocol]
    listing: Listing
    """How it is started."""

    scaled_logprobs: str
    """What gives log-probs under the sampling temperature, for a message."""


SERVER_KINDS = {
    "vllm-server": ServerKind("vLLM", VllmServer, VllmListing(), "start it with --logprobs-mode processed_logprobs"),
    "sglang-server": ServerKind(
        "SGLang", SglangServer, SglangListing(), "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    ),
}


class ServerLink:
    """One server, whichever process it is now. All methods are called from one event loop at a time."""

    def __init__(
        self,
        kind: ServerKind,
        config: ServerConfig,
        folders: WeightFolders,
        log: Path | None,
        *,
        gpu: int | None = None,
    ) -> None:
        """log: of a started server; None: in the temporary folder. gpu: the trainer's, which a started server shares
        unless its environment says otherwise."""
        self.kind = kind
        self._config = config
        self._folders = folders
        self._gpu = gpu
        self._log = log or Path(tempfile.gettempdir()) / f"ratoon-server-{os.getpid()}.log"
        self._process: ServerProcess | None = None
        self._url = config.url
        self._connection: tuple[asyncio.AbstractEventLoop, Transport, ServerProtocol] | None = None
        self.facts: ServerFacts | None = None
        """None before `begin`."""
        self.num_starts = 0
        """Rises with every server that takes the place of another."""

    @property
    def has_begun(self) -> bool:
        return self.facts is not None

    @property
    def server(self) -> ServerProtocol:
        """The server's endpoints, for the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection[0] is not loop or self._connection[1].url != self._url:
            assert self._url is not None, "a server has an address once it was started"
            transport = Transport(
                self._url, name=self.kind.name, api_key=api_key(self._config), timeout_s=self._config.request_timeout_s
            )
            # The sockets of a loop that has ended are closed with its transports.
            self._connection = loop, transport, self.kind.protocol(transport)
        return self._connection[2]

    async def begin(self, weights: Mapping[str, Tensor], version: int, timeout_s: float) -> None:
        """Serve `weights` (under checkpoint names). Waits for a started server until it is ready."""
        folder = await asyncio.to_thread(self._folders.write, weights, version)
        if self._config.command:
            await self._start(folder)
            return
        if not await self.server.is_healthy():
            raise UserError(
                f"no healthy {self.kind.name} server at {self._config.url} (rollout.server.url): GET /health does not "
                "answer 200; start it first, or give rollout.server.command instead"
            )
        await self._greet()
        await self.load(folder, version, timeout_s)

    async def load(self, folder: Path, version: int, timeout_s: float) -> None:
        """Serve the weights of `folder`. Nothing is generating. The server is resumed whatever happens."""
        server = self.server
        await server.pause()
        try:
            await server.load_weights(folder, version, timeout_s)
        finally:
            await server.resume()
        # A server of ours may have to start again, from them.
        self._folders.keep_only(folder if self._config.command else None)

    async def recover(self, error: RolloutError, num_starts: int) -> None:
        """After `error` of a request to the `num_starts`-th server: return when there is one that serves.

        Raises RolloutError where there will be none, with what it died of.
        """
        if self.num_starts != num_starts:
            return
        process = self._process
        if process is None:
            if await self.server.is_healthy():
                return
            raise RolloutError(
                f"the {self.kind.name} server at {self._config.url} is gone: {error}. It was not started by this run, "
                "which cannot start it again: start it and run the same command again"
            ) from error
        status = await self._exit_of(process)
        if status is None:
            return
        folder = self._folders.newest
        died = (
            f"the {self.kind.name} server (process {process.pid}) is gone: {status}; its log is {self._log} and ends\n"
            f"{process.last_complaints()}\n"
        )
        if self.num_starts > self._config.restarts or folder is None:
            raise RolloutError(
                f"{died}It was started again {_times(self.num_starts - 1)}, and rollout.server.restarts = "
                f"{self._config.restarts} allows no more; run the same command again to go on from the last checkpoint"
            ) from error
        await self._start(folder)

    async def close(self) -> None:
        """End a server of ours, and the connections. A second call does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None and connection[0] is asyncio.get_running_loop():
            await connection[1].close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)
        self._folders.close()

    async def _start(self, folder: Path) -> None:
        port = free_port()
        listing = self.kind.listing
        arguments = listing.arguments(model=folder, name=_MODEL_NAME, host=_HOST, port=port)
        environment = [f"{name}={value}" for name, value in listing.environment().items()]
        if self._gpu is not None:
            environment.append(f"CUDA_VISIBLE_DEVICES={_visible_gpu(self._gpu)}")
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        self._process = ServerProcess(
            # An option of the user's wins over ours.
            [*self._config.command, *_without(arguments, self._config.command)],
            [*environment, *self._config.environment],
            log=self._log,
            folder=self._folders.home,
        )
        self._url = f"http://{_HOST}:{port}"
        await self._until_ready(self._process)
        await self._greet()
        self.num_starts += 1
        self._folders.keep_only(folder)

    async def _until_ready(self, process: ServerProcess) -> None:
        end = time.monotonic() + self._config.ready_timeout_s
        while not await self.server.is_healthy():
            status = process.exit_status()
            if status is not None:
                raise UserError(
                    f"the {self.kind.name} server of rollout.server.command did not start: "
                    f"{describe_exit(status)}; its log is {self._log} and ends\n{process.last_complaints()}"
                )
            if time.monotonic() > end:
                await asyncio.to_thread(process.stop)
                raise UserError(
                    f"the {self.kind.name} server of rollout.server.command is not ready after "
                    f"rollout.server.ready_timeout_s = {self._config.ready_timeout_s:g} s, and was ended; its log is "
                    f"{self._log} and ends\n{process.last_complaints()}"
                )
            await asyncio.sleep(_POLL_S)

    async def _greet(self) -> None:
        self.facts = await self.server.facts()
        await self.server.check_serves_updates()

    async def _exit_of(self, process: ServerProcess) -> str | None:
        """How the process ended, in words; None where it serves. One that does neither for long is ended."""
        end = time.monotonic() + _UNHEALTHY_S
        while time.monotonic() < end:
            status = process.exit_status()
            if status is not None:
                return describe_exit(status)
            if await self.server.is_healthy():
                return None
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(process.stop)
        return f"it ran, but was not healthy for {_UNHEALTHY_S:g} s, and was ended"


def api_key(config: ServerConfig) -> str | None:
    """What requests are signed with. Raises UserError where the variable that holds it is not set."""
    name = config.api_key_variable
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UserError(f"rollout.server.api_key_variable names {name}, which is not set; export it")
    return key


def _times(number: int) -> str:
    return f"{number} time" if number == 1 else f"{number} times"


def _visible_gpu(index: int) -> str:
    """What a child must see as its only GPU, to have the `index`-th of ours."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def _without(arguments: list[str], given: tuple[str, ...]) -> list[str]:
    """`arguments` without the options that are `given` already, with their values."""
    names = {entry.partition("=")[0] for entry in given if entry.startswith("--")}
    kept: list[str] = []
    is_dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            is_dropped = argument in names
        if not is_dropped:
            kept.append(argument)
    return kept
