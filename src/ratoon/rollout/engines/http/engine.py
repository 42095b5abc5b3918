"""The engine that generates on a server: each response is one stream, and can go on from its tokens at any time.

Whatever stops responses on the server (new weights, a pause, a lost connection, its death) is met in one way: the
tokens that have come are kept, and the rest of the response is asked for again with them behind the prompt. So no token
is stamped with other weights than those that drew it, whichever pause modes a server has.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.models.settings import setting
from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.draft_maker import DraftMaker, check_prompt
from ratoon.rollout.drafts import GroupDraft, PolicyStamp, ResponseDraft
from ratoon.rollout.draws import request_seed
from ratoon.rollout.engines.http.link import SERVER_KINDS, ServerLink
from ratoon.rollout.engines.http.protocol import ResponseRequest, ServerLostError
from ratoon.rollout.engines.http.refusals import check_sampling, check_settings, num_ranks
from ratoon.rollout.engines.http.session import Session
from ratoon.rollout.engines.http.temperature import check_scaled_logprobs
from ratoon.rollout.engines.http.weight_files import WeightFolders
from ratoon.rollout.errors import RolloutError, RolloutStalledError
from ratoon.rollout.policy_weights import policy_stream
from ratoon.types import Prompt, RolloutGroup, SamplingParams, UserError
from ratoon.weight_sync import WeightProbe, WeightStream

_MOST_BARREN = 3
"""Streams in a row that end without a token, and without a reason of ours."""


@dataclass(slots=True, eq=False)
class _Call:
    """One pending `generate`."""

    draft: GroupDraft
    is_aborted: bool = False


class ServerEngine:
    """A `RolloutEngine` over a vLLM or SGLang server."""

    def __init__(
        self,
        config: RolloutConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        run_dir: Path | None = None,
    ) -> None:
        """model: whose weights are served until `update_weights` gives others. run_dir: takes the server's log.

        Starts nothing: the first call does. Raises UserError for what the server cannot do exactly.
        """
        check_settings(config)
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._stamp = PolicyStamp()
        kind = SERVER_KINDS[config.engine]
        self.probe = WeightProbe(
            f"the {kind.name} server",
            max_mean_abs=config.server.max_probe_gap,
            limit_key="rollout.server.max_probe_gap",
        )
        self._drafts = DraftMaker.of(config, model, tokenizer, self._stamp)
        vocab_size = setting(model.config.get_text_config(), "vocab_size")
        assert isinstance(vocab_size, int), "a language model's config has a vocab_size"
        self._vocab_size = vocab_size
        folder = config.server.transfer_folder
        self._folders = WeightFolders(None if folder is None else Path(folder).absolute(), model, tokenizer)
        log = None if run_dir is None else run_dir / _log_name()
        self._link = ServerLink(kind, config.server, self._folders, log, gpu=model.device.index)
        self._calls: dict[int, _Call] = {}
        self._is_paused = False
        self._is_closed = False
        self._broken: RolloutError | None = None
        """Why nothing can be drawn until new weights have arrived."""
        self._session_of_loop: Session | None = None
        self._last_progress = time.monotonic()

    @property
    def policy_version(self) -> int:
        return self._stamp.version

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        begun: RolloutGroup | None = None,
        max_new_tokens: int | None = None,
    ) -> RolloutGroup:
        """See `RolloutEngine.generate`, but for the draws: those of a response depend on its own seed and on the
        server's rounding, and those after an interruption (new weights, a pause, a budget, a lost server) also on where
        it came. Waits for one stream a response, and before the first for the server itself."""
        self._check_open()
        self._check_request(prompt, group_size, sampling)
        draft = self._drafts.make(
            prompt,
            group_size=group_size,
            sampling=sampling,
            step=step,
            begun=begun,
            max_new_tokens=max_new_tokens,
            vocab_size=self._vocab_size,
        )
        call = _Call(draft)
        self._calls[id(call)] = call
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._ready()
            self._check_length(prompt, sampling)
            for each in draft.open_drafts:
                response = self._complete(call, each)
                tasks.append(asyncio.create_task(response, name=f"response of {prompt.id}"))
            await self._watch(call, tasks)
        finally:
            del self._calls[id(call)]
            await _cancel(tasks)
        return draft.group(self._tokenizer)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """See `RolloutEngine.update_weights`. They are written first, while responses go on; then these stop, the
        server reads, and they go on from the tokens they have, each computed anew under the new weights.

        weights: a `WeightStream`, read once and in order, a bucket at a time. Any other mapping is only a sign that
        the model which the engine was built over has changed, and its weights are read.
        """
        self._check_open()
        stream = weights if isinstance(weights, WeightStream) else self._own_weights()
        session = self._session()
        async with session.changing:
            if not self._link.has_begun:
                await self._begin(stream, version)
                return
            folder = await asyncio.to_thread(self._folders.write, stream, version)
            num_starts = self._link.num_starts
            await self._interrupt(session)
            try:
                try:
                    await self._link.load(folder, version, self._config.timeout_s)
                except RolloutError as error:
                    if not await self._is_lost(error):
                        raise
                    # One that starts again does so from the newest folder.
                    await self._link.recover(error, num_starts)
                    if self._link.num_starts == num_starts:
                        await self._link.load(folder, version, self._config.timeout_s)
            except BaseException as error:
                self._broken = RolloutError(
                    f"the {self._link.kind.name} server has not taken weights of version {version}, and what it holds "
                    f"is not known: {error}"
                )
                raise
            finally:
                self._open_gate(session)
            self._broken = None
            self._stamp.version = version

    async def score(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `ProbedEngine.score`. Waits for a server that starts."""
        await self._ready()
        return np.array(await self._link.server.score(token_ids.tolist()), np.float64)

    async def pause(self) -> None:
        """See `RolloutEngine.pause`. Waits for the server to end every response; their tokens are kept here."""
        self._check_open()
        self._is_paused = True
        session = self._session()
        async with session.changing:
            if self._link.has_begun:
                await self._interrupt(session, resumes=False)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._check_open()
        self._is_paused = False
        session = self._session()
        async with session.changing:
            if self._link.has_begun:
                await self._resume_server()
            self._progressed()
            self._open_gate(session)

    async def abort(self) -> None:
        """See `RolloutEngine.abort`. Waits for the server to hand over what it has drawn, a few seconds at most."""
        calls = list(self._calls.values())
        for call in calls:
            call.is_aborted = True
        session = self._session()
        async with session.changing:
            if calls and self._link.has_begun:
                await self._interrupt(session)
                self._open_gate(session)
            session.wake()
        end = time.monotonic() + self._config.timeout_s
        while any(id(call) in self._calls for call in calls) and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Ends a server that was started here, within seconds, and removes the weights."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with suppress(RolloutError):  # whatever ails the server, it ends
                await self.abort()
        finally:
            await self._link.close()

    async def _ready(self) -> None:
        """The server serves this policy. Waits for whoever begins or changes it."""
        session = self._session()
        async with session.changing:
            self._check_open()
            if not self._link.has_begun:
                await self._begin(self._own_weights(), self._stamp.version)
            if self._broken is not None:
                raise RolloutError(str(self._broken)) from self._broken

    async def _begin(self, stream: WeightStream, version: int) -> None:
        await self._link.begin(stream, version, self._config.timeout_s)
        await check_scaled_logprobs(self._link.server, self._link.kind, self._vocab_size)
        self._stamp.version = version
        self._progressed()

    async def _complete(self, call: _Call, draft: ResponseDraft) -> None:
        """Draw one response to its end, or until its call is aborted, over as many streams as it takes.

        Waits for a slot, for the gate (closed by pauses and new weights), for tokens, and for a server that starts
        again.
        """
        session = self._session()
        num_barren = 0
        while draft.finish_reason is None and not call.is_aborted:
            async with session.slots:
                await session.gate.wait()
                if call.is_aborted:
                    return
                num_tokens, num_interrupts = len(draft.token_ids), session.num_interrupts
                num_starts = self._link.num_starts
                try:
                    await session.run(self._stream(call, draft))
                except RolloutError as error:
                    if not await self._is_lost(error):
                        raise
                    await self._recover(session, error, num_starts)
            is_ours = session.num_interrupts != num_interrupts or self._link.num_starts != num_starts
            num_barren = 0 if is_ours or len(draft.token_ids) > num_tokens else num_barren + 1
            if num_barren == _MOST_BARREN:
                raise RolloutError(
                    f"prompt {call.draft.prompt.id!r}: the {self._link.kind.name} server ended a response after "
                    f"{len(draft.token_ids)} tokens {num_barren} times without another token and without a reason; "
                    "does someone else pause it?"
                )

    async def _stream(self, call: _Call, draft: ResponseDraft) -> None:
        """Consumes one stream of the server's, up to the end of the response or of the stream."""
        request = self._request(call, draft)
        async with aclosing(self._link.server.generate(request)) as chunks:
            async for chunk in chunks:
                for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                    if token >= self._vocab_size:
                        raise RolloutError(
                            f"the {self._link.kind.name} server drew token id {token}, but the policy has "
                            f"{self._vocab_size:,}; it serves another model"
                        )
                    self._progressed()
                    if draft.take(token, logprob):
                        return
                if chunk.end is not None:
                    return

    def _request(self, call: _Call, draft: ResponseDraft) -> ResponseRequest:
        num_tokens = len(draft.token_ids)
        return ResponseRequest(
            token_ids=[*call.draft.prompt.token_ids.tolist(), *draft.token_ids],
            max_tokens=draft.num_left,
            temperature=draft.temperature,
            stop_token_ids=sorted(draft.ending.eos_ids),
            seed=request_seed(draft.key, num_tokens),
            request_id=self._session().next_id(),
        )

    async def _is_lost(self, error: RolloutError) -> bool:
        """Whether `error` is the server's end, or comes of it."""
        return isinstance(error, ServerLostError) or not await self._link.server.is_healthy()

    async def _recover(self, session: Session, error: RolloutError, num_starts: int) -> None:
        async with session.changing:
            if self._broken is not None:
                raise RolloutError(str(self._broken)) from error
            session.is_recovering = True
            try:
                await self._link.recover(error, num_starts)
            except RolloutError as failure:
                self._broken = failure
                raise
            except UserError as failure:  # it started once
                self._broken = RolloutError(f"the server that died did not start again: {failure}")
                raise self._broken from failure
            finally:
                session.is_recovering = False
                self._progressed()

    async def _interrupt(self, session: Session, *, resumes: bool = True) -> None:
        """Stop every stream with the tokens it has; none begins before `_open_gate`.

        The server hands over what it has drawn as it pauses. A lost one does not matter here: whoever needs it next
        will see. resumes: do not leave the server paused.
        """
        session.close_gate()
        try:
            await self._link.server.pause()
            await session.drain()
            await session.cut()
            if resumes:
                await self._resume_server()
        except RolloutError as error:
            if not await self._is_lost(error):
                raise
        finally:
            await session.cut()

    async def _resume_server(self) -> None:
        with suppress(ServerLostError):
            await self._link.server.resume()

    def _open_gate(self, session: Session) -> None:
        if not self._is_paused:
            session.gate.set()

    async def _watch(self, call: _Call, tasks: list[asyncio.Task[None]]) -> None:
        """Until all have ended. Raises the first error; RolloutStalledError when no response of the engine moves for
        `timeout_s`, the server's own start left out, which has a limit of its own."""
        pending = set(tasks)
        session = self._session()
        since = time.monotonic()
        while pending:
            idle_since = time.monotonic() if session.is_recovering else max(since, self._last_progress)
            remaining_s = idle_since + self._config.timeout_s - time.monotonic()
            if remaining_s <= 0:
                raise self._stalled(call, time.monotonic() - idle_since)
            done, pending = await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    def _stalled(self, call: _Call, idle_s: float) -> RolloutStalledError:
        draft = call.draft
        waits_for = (
            "the engine is paused and was not resumed"
            if self._is_paused
            else f"the {self._link.kind.name} server sends none"
        )
        return RolloutStalledError(
            f"prompt {draft.prompt.id!r}: {len(draft.open_drafts)} of {len(draft.drafts)} responses are unfinished "
            f"after {draft.num_tokens} tokens, and no token appeared for {idle_s:.1f} s "
            f"(rollout.timeout_s={self._config.timeout_s:g}): {waits_for}; {len(self._calls)} prompts are pending"
        )

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()

    def _session(self) -> Session:
        if self._session_of_loop is None or not self._session_of_loop.is_of_this_loop():
            self._session_of_loop = Session(self._config.max_concurrent_responses, is_open=not self._is_paused)
        return self._session_of_loop

    def _own_weights(self) -> WeightStream:
        return policy_stream(self._model, self._model.dtype)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("the rollout engine is closed; build another one with build_engine")

    def _check_request(self, prompt: Prompt, group_size: int, sampling: SamplingParams) -> None:
        check_prompt(prompt, group_size, self._vocab_size)
        check_sampling(self._config.engine, sampling)

    def _check_length(self, prompt: Prompt, sampling: SamplingParams) -> None:
        assert self._link.facts is not None, "the server is ready"
        most, longest = self._link.facts.max_tokens, prompt.num_tokens + sampling.max_response_tokens
        if most is not None and longest > most:
            raise UserError(
                f"prompt {prompt.id!r} has {prompt.num_tokens:,} tokens; with rollout.max_response_tokens="
                f"{sampling.max_response_tokens:,} that is {longest:,}, over the {most:,} of the "
                f"{self._link.kind.name} server; lower one of them, drop the prompt, or start it for longer ones"
            )


def _log_name() -> str:
    return f"server-rank{dist.get_rank()}.log" if num_ranks() > 1 else "server.log"


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
