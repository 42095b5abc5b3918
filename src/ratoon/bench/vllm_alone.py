"""vLLM without us: its own `LLM.generate`, engine process, scheduler and defaults, with weights from a folder.

What `rollout.engine = "vllm"` costs over it can be seen beside it: that one runs vLLM's core in this process, a step at
a time, so that weights can change between two tokens.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ratoon.bench.outcome import CannotRunError
from ratoon.rollout.engines.vllm.config import VllmConfig
from ratoon.types import Prompt, Response, RolloutGroup, SamplingParams

_IN_A_PROCESS_OF_ITS_OWN = "VLLM_ENABLE_V1_MULTIPROCESSING"


class VllmAlone:
    """Blocks this process until vLLM has started. Raises CannotRunError where it is not installed."""

    def __init__(self, model: PreTrainedModel, *, max_concurrent_responses: int) -> None:
        try:
            from vllm import LLM  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise CannotRunError(f"vLLM is not installed here: {error}") from error
        before = os.environ.get(_IN_A_PROCESS_OF_ITS_OWN)
        os.environ[_IN_A_PROCESS_OF_ITS_OWN] = "1"
        try:
            with tempfile.TemporaryDirectory(prefix="ratoon-vllm-") as folder:
                model.save_pretrained(folder)
                self._llm: Any = LLM(
                    folder,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # no sampling defaults from a file
                    dtype=str(model.dtype).removeprefix("torch."),
                    max_num_seqs=max_concurrent_responses,
                    gpu_memory_utilization=VllmConfig().gpu_memory_utilization,  # the trainer's model is there too
                    logprobs_mode="processed_logprobs",
                )
        finally:
            os.environ.pop(_IN_A_PROCESS_OF_ITS_OWN)
            if before is not None:
                os.environ[_IN_A_PROCESS_OF_ITS_OWN] = before

    async def generate_all(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, eos_ids: Sequence[int]
    ) -> list[RolloutGroup]:
        """One group for each prompt, all of them in one call."""
        return await asyncio.to_thread(self._generate, prompts, group_size, sampling, eos_ids)

    def _generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, eos_ids: Sequence[int]
    ) -> list[RolloutGroup]:
        from vllm import SamplingParams as VllmSampling  # pyright: ignore[reportMissingImports]

        self._llm.reset_prefix_cache()  # each call computes its prompts, as after new weights
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt.token_ids.tolist()} for prompt in prompts],
            VllmSampling(
                n=group_size,
                temperature=sampling.temperature,
                max_tokens=sampling.max_response_tokens,
                ignore_eos=True,
                stop_token_ids=list(eos_ids),
                logprobs=0,  # of the drawn token alone
                detokenize=False,
            ),
            use_tqdm=False,
        )
        return [
            RolloutGroup(prompt, tuple(_response(each) for each in output.outputs))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    async def close(self) -> None:
        """End its process."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def _response(output: Any) -> Response:
    token_ids = np.array(output.token_ids, np.int64)
    logprobs = [each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)]
    return Response(
        token_ids,
        rollout_logprobs=np.array(logprobs, np.float32),
        policy_versions=np.zeros(token_ids.size, np.int64),
    )
