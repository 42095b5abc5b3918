"""vLLM's engine core in this process: started without weights, given them bucket by bucket, stepped by hand."""

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from vllm import LLM  # pyright: ignore[reportMissingImports]
from vllm import __version__ as vllm_version  # pyright: ignore[reportMissingImports]
from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import SamplingParams as VllmSampling  # pyright: ignore[reportMissingImports]

from ratoon.rollout.engines.vllm.config import VllmConfig
from ratoon.rollout.engines.vllm.requests import NewTokens
from ratoon.rollout.engines.vllm.session import UpdateSession
from ratoon.rollout.engines.vllm.transfer import BACKEND, register
from ratoon.rollout.engines.vllm.versions import interfaces_of
from ratoon.rollout.errors import RolloutError
from ratoon.weight_sync import WeightSyncError, check_same_names, iter_buckets

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs here, where the weights are
}
_DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # whoever wants to report how they use vLLM can say so
}
_CPU_CACHE_BYTES = 1 << 30
_PROBE = "ratoon-probe"


class VllmCore:
    """Every call blocks, and comes from one thread."""

    def __init__(
        self, model: PreTrainedModel, config: VllmConfig, max_concurrent_responses: int, dtype: torch.dtype
    ) -> None:
        """A core for models of this configuration, with random weights until `load`.

        The random states and the thread settings of this process stay as they were, which vLLM changes otherwise.
        """
        register()
        self._interfaces = interfaces_of(vllm_version)
        if not self._interfaces.has_head_dtype:
            from ratoon.rollout.engines.vllm.head import register_head  # of a base class that later versions changed

            register_head()
        self._is_cuda = model.device.type == "cuda"
        self._sleeps = config.sleep > 0 and self._is_cuda
        with tempfile.TemporaryDirectory(prefix="ratoon-vllm-") as folder, _as_it_was():
            _write_config(model, folder)
            self._llm = LLM(folder, **_arguments(model, config, max_concurrent_responses, dtype, sleeps=self._sleeps))
        self._engine = self._llm.llm_engine
        self._held: list[NewTokens] = []
        """Drawn while tokens were scored, and not handed out yet."""

        self.max_model_len: int = self._llm.model_config.max_model_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._held) or self._engine.has_unfinished_requests()

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        eos_ids: list[int],
    ) -> None:
        """Queue one response."""
        sampling = VllmSampling(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=eos_ids,
            ignore_eos=True,  # they are among the ids above
            logprobs=0,  # of the drawn token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, sampling)

    def step(self) -> list[NewTokens]:
        """One forward pass, and what it drew; or what was drawn while tokens were scored."""
        if self._held:
            held, self._held = self._held, []
            return held
        return [_new_tokens(output) for output in self._engine.step()]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ones are ignored."""
        self._engine.abort_request(list(request_ids))

    def load(self, weights: Mapping[str, Tensor], max_bytes: int, *, version: int) -> None:
        """Replace all weights; responses in flight are computed anew from their tokens, under the new ones.

        Consumes a checkpoint, a bucket of at most `max_bytes` at a time. Raises WeightSyncError where vLLM refuses a
        tensor or lacks one; the core is then of no use until a later call succeeds.
        """
        session = UpdateSession(self._llm, self._interfaces)
        session.open()
        try:
            for bucket in iter_buckets(weights.items(), max_bytes):
                _hand_over(session, bucket, version)
        finally:
            missing = session.close(version)
        check_same_names([], missing, giver=f"version {version}", taker="the policy, beside what vLLM has,")
        self.forget_cache()

    def score(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """[M] nats: log-probs of all tokens but the first, at temperature 1, nothing of them read from the cache."""
        tokens = token_ids.tolist()
        sampling = VllmSampling(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._engine.add_request(_PROBE, {"prompt_token_ids": tokens}, sampling)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            self._held += [_new_tokens(output) for output in outputs if output.request_id != _PROBE]
            for output in outputs:
                if output.request_id == _PROBE:
                    found = output.prompt_logprobs[1:]
                    pairs = zip(tokens[1:], found, strict=True)
                    return np.array([each[token].logprob for token, each in pairs], np.float64)
        raise RolloutError("vLLM did not score the tokens that it was given")

    def forget_cache(self) -> None:
        """No key or value is used again; what is in flight is computed anew."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def sleep(self, level: int) -> None:
        """Give up memory (`VllmConfig.sleep`). Responses in flight are kept and computed anew."""
        if self._sleeps:
            self.forget_cache()
            self._llm.sleep(level=level, mode="keep")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take memory back. Weights that were given up by level 2 are random until `load`."""
        if self._sleeps:
            self._llm.wake_up(tags=[what] if what == "weights" else [what, "scheduling"])

    def close(self) -> None:
        """Free the device's memory as far as vLLM lets go of it."""
        self._engine.engine_core.shutdown()
        del self._engine, self._llm
        if self._is_cuda:
            torch.cuda.empty_cache()


def _hand_over(session: UpdateSession, bucket: list[tuple[str, Tensor]], version: int) -> None:
    try:
        session.hand_over(bucket)
    except Exception as error:
        names = ", ".join(name for name, _ in bucket[:3])
        raise WeightSyncError(
            f"vLLM refused weights of version {version} (a bucket that begins with {names}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _new_tokens(output: Any) -> NewTokens:
    (part,) = output.outputs
    return NewTokens(
        request_id=output.request_id,
        token_ids=list(part.token_ids),
        logprobs=list(part.logprobs.logprobs) if part.logprobs else [],
        finish_reason=part.finish_reason,
        num_reused=output.num_cached_tokens or 0,
    )


def _arguments(
    model: PreTrainedModel, config: VllmConfig, max_concurrent_responses: int, dtype: torch.dtype, *, sleeps: bool
) -> dict[str, Any]:
    is_cuda = model.device.type == "cuda"
    cache_bytes = None if is_cuda else _CPU_CACHE_BYTES
    if config.cache_gib is not None:
        cache_bytes = int(config.cache_gib * (1 << 30))
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from a file
        "hf_overrides": {"head_dtype": config.head_dtype},
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "max_num_seqs": max_concurrent_responses,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache_bytes,
        "enforce_eager": (not is_cuda) if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": True,  # a group's prompt is computed once
        "logprobs_mode": "processed_logprobs",  # of the distribution that was drawn from
        # A step's tokens come out of the step that drew them, and carry the version of its weights.
        "async_scheduling": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "enable_sleep_mode": sleeps,
        "disable_log_stats": True,
    }
    if not is_cuda:
        # vLLM sets a draw's generator back where only a part of a prompt was computed, and a CPU's cannot be.
        arguments["enable_chunked_prefill"] = False
    return arguments


def _write_config(model: PreTrainedModel, folder: str) -> None:
    """What vLLM reads instead of a checkpoint."""
    config = model.config
    before = config.architectures
    config.architectures = [type(model).__name__]  # models that were not loaded from a folder do not say
    try:
        config.save_pretrained(folder)
    finally:
        config.architectures = before


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Inside, vLLM may seed every generator and bind threads; outside nothing of it is left."""
    set_num_threads: Callable[[int], None] = torch.set_num_threads
    num_threads = torch.get_num_threads()
    python, numpy = random.getstate(), np.random.get_state()
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)
