"""What the trainer may be told."""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.types.limits import MAX_FACTOR, MAX_PROCESSES, MAX_PROCESSES_OF_HOST, MAX_RESPONSES, MAX_STEPS


class TrainerConfig(BaseModel):
    """Length of the run, optimizer, schedule and checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_steps: int = Field(default=100, ge=0, le=MAX_STEPS)
    """Steps of the run: one rollout of `rollout.prompts_per_step` prompts and the updates made from it."""

    learning_rate: float = Field(default=1e-6, gt=0, le=MAX_FACTOR, allow_inf_nan=False)
    """AdamW's peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls, from the end of the warm-up to `num_steps`."""

    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps over which the learning rate rises from 0."""

    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR, allow_inf_nan=False)
    """AdamW's decoupled decay, applied to matrices only."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global 2-norm are scaled down to it; inf never clips."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model trains and samples; auto takes a CUDA device if there is one."""

    num_processes: Literal["auto"] | int = "auto"
    """Processes (ranks) of this host that train together, each on a GPU of its own; auto: one for each visible GPU, and
    one on a CPU; at most 1,024. Under torchrun, which starts them itself, it is not read."""

    sharding: Literal["auto", "none", "full"] = "auto"
    """What several processes hold: `full`, each a part of every weight, gradient and moment (FSDP2), gathered layer by
    layer, and beside it the whole model to sample from; `none`, each the whole. `auto`: `full`, but `none` with
    `model.lora` or 8-bit `optimizer_states`. One process holds the whole in any case."""

    sequence_parallel: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """How many processes hold each microbatch together (Ulysses), each a part of its rows, and in attention a part of
    the heads: for packs that one GPU has no room for. It divides the number of processes and the model's attention
    heads; neighbours share, so that the processes of one host should be a multiple of it."""

    rank_timeout_s: float = Field(default=1800.0, gt=0, le=2_000_000, allow_inf_nan=False)
    """How long one process waits for another before the run ends: longer than the rollouts of two can differ, and than
    scoring a step and writing a checkpoint take. With several processes a recipe is refused in which it is not above
    `reward.timeout_s`, `reward.start_timeout_s`, `rollout.timeout_s` and, where the run starts a server,
    `rollout.server.ready_timeout_s`."""

    offload_optimizer: bool = False
    """Keep AdamW's moments and float32 weights in host memory, 16 bytes a weight, and update there: a step is slower by
    what its gradients and weights take to and from the GPU. One process with a CUDA device."""

    optimizer_states: Literal["float32", "8bit"] = "float32"
    """How AdamW's two moments are held: 4 bytes each a weight, or 1 and a scale for every 256, rounded after each
    update (tensors of fewer than 4,096 weights stay in float32). `8bit` needs bitsandbytes (`pip install -e ".[8bit]"`
    in the clone of Ratoon) and whole weights on each process: neither `offload_optimizer` nor `sharding = "full"`."""

    checkpoint_every_steps: int = Field(default=50, ge=1, le=MAX_STEPS)
    """A checkpoint is written after every so many steps, and after the last."""

    keep_checkpoints: int = Field(default=2, ge=1, le=MAX_STEPS)
    """The newest so many checkpoints are kept."""

    @field_validator("num_processes")
    @classmethod
    def _is_a_count(cls, count: str | int) -> str | int:
        if isinstance(count, int) and not 1 <= count <= MAX_PROCESSES_OF_HOST:
            raise ValueError(f'must be at least 1 and at most {MAX_PROCESSES_OF_HOST}, or "auto"')
        return count

    @field_validator("betas")
    @classmethod
    def _are_decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas

    @model_validator(mode="after")
    def _updates_in_one_place(self) -> Self:
        if self.optimizer_states == "8bit":
            reason = 'with optimizer_states = "8bit" moments are updated whole and where the weights are: '
            if self.offload_optimizer:
                raise ValueError(reason + "remove offload_optimizer, or optimizer_states")
            if self.sharding == "full":
                raise ValueError(reason + 'set sharding to "none" or "auto", or remove optimizer_states')
        return self


class SftConfig(BaseModel):
    """A supervised warm start on demonstrations, before any rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    demonstrations: str | None = None
    """`column:NAME` (a column of the data) or `python:FILE.py:FUNCTION` (relative to the recipe; it returns the text
    to imitate, given the `prompt`, `answer`, `metadata` or columns that it names). Absent: the data's own answers."""

    num_steps: int = Field(default=100, ge=1, le=MAX_STEPS)
    """Optimizer updates."""

    prompts_per_step: int = Field(default=32, ge=1, le=MAX_RESPONSES)
    """Prompts (with their answers) in one update."""

    learning_rate: float = Field(default=1e-3, gt=0, le=MAX_FACTOR, allow_inf_nan=False)
    """AdamW's peak learning rate; it falls linearly to a tenth of that."""

    warmup_steps: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Steps over which the learning rate rises from 0."""

    @field_validator("demonstrations")
    @classmethod
    def _names_a_column_or_function(cls, text: str | None) -> str | None:
        is_column = text is not None and text.startswith("column:") and len(text) > len("column:")
        is_function = text is not None and re.fullmatch(r"python:.+\.py:[A-Za-z_]\w*", text)
        if text is not None and not (is_column or is_function):
            raise ValueError('must be "column:NAME" or "python:FILE.py:FUNCTION"')
        return text
