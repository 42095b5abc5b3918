"""Which algorithm, and its few numbers."""

from types import MappingProxyType
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

# One row for each algorithm: what its paper sets differently from the fields' defaults.
_PAPER_SETTINGS = MappingProxyType(
    {
        "grpo": {"clip_high": 0.2, "loss_mean": "sequence"},  # arXiv 2402.03300, eq. 3
        "dapo": {"clip_high": 0.28, "loss_mean": "token"},  # arXiv 2503.14476, §4.1 and eq. 8
    }
)


class AlgorithmConfig(BaseModel):
    """The policy's objective. `name` sets the fields that are not given; a given value wins."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Literal["grpo", "dapo"] = "grpo"
    """grpo: group-relative advantages, PPO clip, mean over sequences. dapo: clip-higher, mean over tokens."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, allow_inf_nan=False)
    """The probability ratio's lower bound is 1 - clip_low."""

    clip_high: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """The probability ratio's upper bound is 1 + clip_high. 0.2 for grpo, 0.28 for dapo."""

    normalize_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation; false gives Dr.GRPO's advantages."""

    loss_mean: Literal["sequence", "token"] = "sequence"
    """What weighs the same in the loss: each response of a step, or each token. grpo: sequence, dapo: token."""

    entropy_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Loss per nat of mean token entropy, subtracted; 0 leaves entropy out."""

    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates that one rollout's groups are cut into. At 1, no ratio leaves 1 and nothing is clipped."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_paper(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cast(dict[str, Any], given)
        name = fields.get("name", "grpo")
        # An unknown name adds nothing here: the field's own check reports it.
        settings = _PAPER_SETTINGS.get(name, {}) if isinstance(name, str) else {}
        return {**settings, **fields}
