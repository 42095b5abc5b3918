"""What vLLM gets of the machine when it runs in the trainer's process."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ratoon.types.limits import MAX_MIB, MAX_TOKENS


class VllmConfig(BaseModel):
    """The `[rollout.vllm]` table of a recipe: of the engine `vllm`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for vLLM: its copy of the weights, activations and the key/value cache. The trainer needs
    the rest, or all of it while vLLM sleeps."""

    cache_gib: float | None = Field(default=None, gt=0, le=MAX_MIB // 1024, allow_inf_nan=False)
    """GiB of the key/value cache. Absent: on a GPU what `gpu_memory_utilization` leaves, on a CPU 1."""

    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Longest prompt with its response, in tokens. Absent: the model's positions, for one of which the cache must have
    the room."""

    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs: slower tokens, an earlier first one. Absent: on a CPU yes, on a GPU no."""

    dtype: Literal["model", "float32"] = "model"
    """What vLLM computes in. "float32" holds 16-bit weights in twice the memory, and leaves of the difference to a
    16-bit trainer's log-probs the trainer's own rounding alone."""

    head_dtype: Literal["float32", "model"] = "float32"
    """Of the logits. Those of a 16-bit model are rounded to steps of up to 0.1 nats in its own dtype, and the trainer's
    are not; the float32 of a GPU's product costs little, on a CPU the head is cast anew in each step."""

    sleep: Literal[0, 1, 2] = 0
    """What vLLM gives up while the trainer works, on a GPU: 0 nothing, 1 its cache and (to main memory) its weights, 2
    its cache and its weights, which the next update brings anew."""

    bucket_mib: int = Field(default=256, ge=1, le=MAX_MIB)
    """MiB of weights that are handed over at a time; a larger tensor goes alone."""

    max_probe_gap: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Nats. After every update vLLM and the trainer score the same few tokens; a larger mean difference of their
    log-probs ends the run and says what it looks like."""
