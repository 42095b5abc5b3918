"""The recipe of a run: each stage's own config, under the stage's name."""

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.config.evaluation import EvaluationConfig
from ratoon.config.stop import MIN_CYCLE_TOKENS, StopConfig
from ratoon.data.config import DataConfig
from ratoon.metrics.config import LoggingConfig
from ratoon.models.config import ModelConfig
from ratoon.planner.config import PlannerConfig
from ratoon.rewards.config import RewardConfig
from ratoon.rollout.config import RolloutConfig
from ratoon.trainer.config import SftConfig, TrainerConfig
from ratoon.types.limits import MAX_EVALUATED, MAX_RESPONSES


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
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
            raise ValueError("must be a folder name of up to 200 letters, digits, '.', '_' and '-'")
        return name


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
    logging: LoggingConfig = LoggingConfig()
    stop: StopConfig = StopConfig()

    @model_validator(mode="after")
    def _stages_fit(self) -> "Recipe":
        if self.rollout.group_size < 2 and self.algorithm.compares_siblings:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size}, but {self.algorithm.name} compares the responses "
                "of one prompt with each other: alone, every advantage is 0; set it to 2 or more"
            )
        if self.algorithm.num_minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"algorithm.num_minibatches is {self.algorithm.num_minibatches}, more than "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}: some updates would have no group"
            )
        if self.rollout.max_new_tokens_per_step is not None and self.algorithm.dynamic_sampling:
            raise ValueError(
                "rollout.max_new_tokens_per_step does not go with algorithm.dynamic_sampling, which draws groups until "
                "a step is full: those of later rounds would not be complete; set algorithm.dynamic_sampling to false, "
                "or leave rollout.max_new_tokens_per_step out"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_held(self) -> "Recipe":
        if (num_responses := self.rollout.responses_per_step) > MAX_RESPONSES:
            raise ValueError(
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step} times rollout.group_size = "
                f"{self.rollout.group_size} is {num_responses:,} responses, and a step may have {MAX_RESPONSES:,}; "
                "lower one of them"
            )
        if (num_answers := self.data.num_heldout * self.evaluation.group_size) > MAX_EVALUATED:
            raise ValueError(
                f"data.num_heldout = {self.data.num_heldout} times evaluation.group_size = "
                f"{self.evaluation.group_size} is {num_answers:,} answers, and an evaluation may have "
                f"{MAX_EVALUATED:,}; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_and_stop_rules_can_act(self) -> "Recipe":
        if self.evaluation.keep_best and self.data.num_heldout == 0:
            raise ValueError(
                "evaluation.keep_best goes by the held-out reward, but data.num_heldout is 0; hold prompts out"
            )
        if self.stop.max_kl_old is not None and self.algorithm.num_minibatches == 1:
            raise ValueError(
                "stop.max_kl_old cannot act on one update a step, before which the policy has not moved; "
                "remove it, or set algorithm.num_minibatches to 2 or more"
            )
        if self.stop.max_kl_ref is not None and self.algorithm.kl_in != "loss":
            raise ValueError(
                "stop.max_kl_ref goes by kl_ref_mean, which only a KL penalty in the loss measures; remove it, or set "
                'algorithm.kl_coefficient above 0 with algorithm.kl_in = "loss"'
            )
        if self.stop.max_repetitive_fraction is not None and self.rollout.max_response_tokens < MIN_CYCLE_TOKENS:
            raise ValueError(
                f"stop.max_repetitive_fraction cannot act where rollout.max_response_tokens is "
                f"{self.rollout.max_response_tokens}: a repetition counts from {MIN_CYCLE_TOKENS} tokens on; remove it"
            )
        return self
