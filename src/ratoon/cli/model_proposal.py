"""How a model folder is best trained on a machine, by its configuration and the memory estimate."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ratoon.cli.recipe_templates import Machine
from ratoon.loop.device_memory import DeviceMemory
from ratoon.models import load_tokenizer, preview_model
from ratoon.models.config import Dtype, ModelConfig, Recompute
from ratoon.models.load import DTYPES
from ratoon.models.outline import outline_model
from ratoon.planner.memory import estimate_memory
from ratoon.planner.memory_sizes import GenerationSize, MicrobatchSize, WeightsInMemory

ASSUMED_GPU_GIB = 80
"""Where the recipe is written on a machine without a GPU."""

_ROWS = (32_768, 16_384, 8_192, 4_096)
_ENOUGH_ROWS = 8_192
"""Below this many rows, computing activations again is the better bargain."""

_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_CACHE_ROWS = 65_536
"""Assumed of the rollout engine's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProposal:
    """What a recipe should say about a model."""

    dtype: Dtype
    recompute: Recompute
    """What "auto" is expected to take."""

    max_rows_per_microbatch: int
    has_chat_template: bool
    num_parameters: int | None

    estimate_bytes: int | None
    """At these rows; None where the number of weights is not known."""

    device: DeviceMemory
    """That the estimate was held against."""

    @property
    def fits(self) -> bool:
        return self.estimate_bytes is None or self.estimate_bytes <= self.device.usable_bytes

    @property
    def learning_rate(self) -> str:
        """Small models take larger steps."""
        return "1e-6" if self.num_parameters is None or self.num_parameters > 1e9 else "5e-6"


def propose(path: str, *, gguf_file: str | None, machine: Machine, memory_gib: float | None) -> ModelProposal:
    """Reads the folder's configuration and tokenizer, no weights. Raises UserError for what cannot be trained.

    memory_gib: of the device; None takes this machine's, or `ASSUMED_GPU_GIB` for a GPU that is not here.
    """
    import torch

    dtype: Dtype = "bfloat16" if machine == "gpu" else "float32"
    config = ModelConfig(path=path, gguf_file=gguf_file, dtype=dtype)
    preview = preview_model(config)
    tokenizer = load_tokenizer(path, gguf_file=gguf_file)
    device_type = "cuda" if machine == "gpu" else "cpu"
    if memory_gib is not None:
        device = DeviceMemory.of_total(device_type, int(memory_gib * 2**30))
    elif machine == "gpu" and not torch.cuda.is_available():
        device = DeviceMemory.of_total(device_type, ASSUMED_GPU_GIB << 30)
    else:
        device = DeviceMemory.here(torch.device(device_type))
    recompute, num_rows, estimate = _RECOMPUTES[0], _ENOUGH_ROWS, None
    if preview.num_parameters is not None:
        weights = WeightsInMemory(
            num_parameters=preview.num_parameters,
            num_trainable_parameters=preview.num_parameters,
            dtype_bytes=DTYPES[dtype].itemsize,
        )
        has_qk_norm = outline_model(config, device_type=device_type, longest_sequence=1).has_qk_norm
        for recompute, num_rows in _candidates():
            estimate = estimate_memory(
                preview.shape,
                weights,
                MicrobatchSize(num_rows=num_rows, num_scored=num_rows, recompute=recompute, has_qk_norm=has_qk_norm),
                GenerationSize(cache_tokens=_CACHE_ROWS, num_concurrent=128),
                on_cuda=machine == "gpu",
            ).peak_bytes
            if estimate <= device.usable_bytes:
                break
    return ModelProposal(
        dtype=dtype,
        recompute=recompute,
        max_rows_per_microbatch=num_rows,
        has_chat_template=bool(tokenizer.chat_template),
        num_parameters=preview.num_parameters,
        estimate_bytes=estimate,
        device=device,
    )


def _candidates() -> Iterator[tuple[Recompute, int]]:
    """From the fastest to the smallest: enough rows with ever more recomputation, then fewer rows."""
    for recompute in _RECOMPUTES:
        for rows in _ROWS:
            if rows >= _ENOUGH_ROWS or recompute == _RECOMPUTES[-1]:
                yield recompute, rows


def model_table(path: str, gguf_file: str | None, proposal: ModelProposal) -> str:
    """The `[model]` table of a recipe, with its header."""
    lines = ["[model]", f"path = {json.dumps(path)} # relative to the folder the command is started in"]
    if gguf_file is not None:
        lines.append(f"gguf_file = {json.dumps(gguf_file)}")
    lines.append(f"dtype = {json.dumps(proposal.dtype)} # of weights and computation; the optimizer keeps float32")
    lines.append(
        f'recompute = "auto" # the fastest that fits of none, selective, full; at these rows probably '
        f"{proposal.recompute}"
    )
    return "\n".join(lines)
