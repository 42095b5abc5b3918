"""How responses are scored."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

REASONING_GYM = "reasoning-gym"
EXACT_MATCH = "exact-match"
PYTHON_PREFIX = "python:"

Extract = Literal["text", "last-number", "answer-tag"]


class RewardConfig(BaseModel):
    """The `[reward]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    function: str
    """`"reasoning-gym"` (the task's own scorer), `"exact-match"`, or `"python:FILE.py:FUNCTION"` (relative to the
    recipe)."""

    extract: Extract = "text"
    """What part of the response is its answer: all its text, the last number, or what the last
    `<answer>...</answer>` holds. A response without one scores 0."""

    score_truncated: bool = True
    """False gives 0 to a response that `rollout.max_response_tokens` cut, whatever it holds: without it, a policy
    can learn that never ending costs nothing."""

    timeout_s: float = Field(default=30.0, gt=0, le=604_800, allow_inf_nan=False)
    """Longest time for scoring one response; the run ends with the prompt's name when it is exceeded."""

    @property
    def python_target(self) -> tuple[str, str] | None:
        """(file, function) of a Python reward, None for the built-in ones."""
        if not self.function.startswith(PYTHON_PREFIX):
            return None
        file, _, function = self.function.removeprefix(PYTHON_PREFIX).rpartition(":")
        return file, function

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.python_target is None:
            if self.function not in (REASONING_GYM, EXACT_MATCH):
                raise ValueError(
                    f'reward.function must be "{REASONING_GYM}", "{EXACT_MATCH}" or '
                    f'"{PYTHON_PREFIX}FILE.py:FUNCTION", got "{self.function}"'
                )
            return self
        file, function = self.python_target
        if not file.endswith(".py") or not function.isidentifier():
            raise ValueError(
                f'reward.function must read "{PYTHON_PREFIX}FILE.py:FUNCTION", got "{self.function}"; '
                f'for example "{PYTHON_PREFIX}rewards.py:score"'
            )
        if self.extract != "text":
            raise ValueError(
                f'reward.extract = "{self.extract}" cannot act on a Python function, which is given the whole '
                "response; call ratoon.rewards.extract_answer in it"
            )
        return self
