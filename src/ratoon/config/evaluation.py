"""How the held-out prompts are answered and scored, and which checkpoint they keep."""

from dataclasses import replace
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.types.limits import MAX_GROUP_SIZE, MAX_STEPS, MAX_TOKENS, MAX_VOCABULARY
from ratoon.types.sampling import SamplingParams


class EvaluationConfig(BaseModel):
    """The `[evaluation]` table: how the held-out prompts (`data.num_heldout`) are answered and scored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Evaluate after every so many steps; before the first and after the last it is always done."""

    group_size: int = Field(default=1, ge=1, le=MAX_GROUP_SIZE)
    """Answers drawn for each held-out prompt; with N of them pass@1 to pass@N are reported. Times
    `data.num_heldout`, at most 1,048,576."""

    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """An answer passes (pass@k) when its reward is at least this, to within rounding."""

    temperature: float = Field(default=1.0, ge=0, le=1e6)
    """Sampling temperature of the answers; 0 is greedy, and the least above it 1e-6."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw among the likeliest tokens whose probabilities add up to this; absent: as in `[rollout]`."""

    top_k: int | None = Field(default=None, ge=0, le=MAX_VOCABULARY)
    """Draw among this many likeliest tokens, 0 among all; absent: as in `[rollout]`."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw among tokens at least this many times as likely as the likeliest; absent: as in `[rollout]`."""

    max_response_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """An answer is cut after this many tokens, EOS included; absent: `rollout.max_response_tokens`."""

    keep_best: bool = False
    """Keep, beside `trainer.keep_checkpoints`, the checkpoint with the best held-out reward; an evaluation after
    `every_steps` that sets a new best writes one."""

    @field_validator("temperature")
    @classmethod
    def _divides_logits(cls, temperature: float) -> float:
        if 0 < temperature < 1e-6:
            raise ValueError("must be 0 (greedy) or at least 1e-6")
        return temperature

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"evaluation.group_size is {self.group_size}, but at evaluation.temperature = 0 (greedy) all answers "
                "to a prompt are the same; set group_size to 1 or raise the temperature"
            )
        if self.keep_best and self.every_steps is None:
            raise ValueError(
                "evaluation.keep_best compares evaluations during the run, but evaluation.every_steps is not set"
            )
        return self

    def sampling_params(self, training: SamplingParams) -> SamplingParams:
        """The distribution that answers are drawn from; `training` is the run's own, for what is not set here."""
        return replace(
            training,
            temperature=self.temperature,
            top_p=training.top_p if self.top_p is None else self.top_p,
            top_k=training.top_k if self.top_k is None else self.top_k,
            min_p=training.min_p if self.min_p is None else self.min_p,
            max_response_tokens=self.max_response_tokens or training.max_response_tokens,
        )
