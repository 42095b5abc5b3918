"""The recipe of a run: each stage's own config, under the stage's name."""

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.data.config import DataConfig
from ratoon.models.config import ModelConfig
from ratoon.planner.config import PlannerConfig
from ratoon.rewards.config import RewardConfig
from ratoon.rollout.config import RolloutConfig
from ratoon.trainer.config import SftConfig, TrainerConfig


class RunConfig(BaseModel):
    """Where a run lives and what fixes its chance."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """The run's folder is `output_dir/name`; the same name again resumes the run."""

    output_dir: str = "runs"
    """Relative to the folder the command is started in."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes the fresh model's weights, the order of the prompts and every draw of every response."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("must be a folder name of letters, digits, '.', '_' and '-'")
        return name


class EvaluationConfig(BaseModel):
    """How the held-out prompts (`data.num_heldout`) are answered and scored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate after every so many steps; before the first and after the last it is always done."""

    temperature: float = Field(default=1.0, ge=0, le=1e6)
    """Sampling temperature of the answers; 0 is greedy, and the least above it 1e-6."""

    group_size: int = Field(default=1, ge=1)
    """Answers drawn for each held-out prompt."""

    @field_validator("temperature")
    @classmethod
    def _divides_logits(cls, temperature: float) -> float:
        if 0 < temperature < 1e-6:
            raise ValueError("must be 0 (greedy) or at least 1e-6")
        return temperature


class Recipe(BaseModel):
    """Everything a run may be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    sft: SftConfig | None = None
    """Absent: training starts from the model as it is."""
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    planner: PlannerConfig = PlannerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _stages_fit(self) -> "Recipe":
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size}, but {self.algorithm.name} compares the responses "
                "of one prompt with each other: alone, every advantage is 0; set it to 2 or more"
            )
        if self.algorithm.num_minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"algorithm.num_minibatches is {self.algorithm.num_minibatches}, more than "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}: some updates would have no group"
            )
        return self
