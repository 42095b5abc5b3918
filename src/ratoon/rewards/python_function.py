"""A reward function from the user's own file. Workers hold it."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ratoon.data.user_function import UserFunction, load_function
from ratoon.rewards.components import PromptText
from ratoon.rewards.messages import ComponentKind
from ratoon.types.errors import UserError

_OF_ONE = ("prompt", "response", "answer", "metadata")
_OF_MANY = ("prompts", "responses", "answers", "metadata")


class PythonScorer:
    """Calls a function with those of its parameters that a prompt and its response can fill.

    `prompt` and `response` are texts, `answer` is text or None, `metadata` is the data row by column; any other name
    is one of its columns. A function that asks for `responses` is called once for all responses of a prompt: then
    `prompts`, `responses`, `answers`, `metadata` and the row's keys are lists with one entry for each response.
    """

    def __init__(self, function: UserFunction) -> None:
        self.is_batch = "responses" in (*function.required, *function.optional)
        self.is_async = _is_coroutine_function(function.function)
        self._function = function
        if self.is_batch and "response" in function.required:
            raise UserError(
                f'{function.label} asks for "response" and for "responses"; ask for one of them: '
                '"responses" are lists of all responses of a prompt'
            )

    @property
    def kind(self) -> ComponentKind:
        function = self._function
        return ComponentKind(
            is_batch=self.is_batch,
            is_async=self.is_async,
            label=function.label,
            required=function.required,
            always=_OF_MANY if self.is_batch else _OF_ONE,
        )

    def check(self, prompt: PromptText) -> None:
        self._function.check_names(_OF_MANY if self.is_batch else _OF_ONE, prompt.metadata, f"prompt {prompt.id!r}")

    def __call__(self, prompt: PromptText, response: Any) -> object:
        """response: text, or for a batch function a list of them. The prompt must be the call's own copy."""
        known = self._of_many(prompt, response) if self.is_batch else self._of_one(prompt, response)
        return self._function.function(**self._function.choose(known))

    def _of_one(self, prompt: PromptText, response: str) -> dict[str, Any]:
        return {
            **prompt.metadata,
            "prompt": prompt.text,
            "response": response,
            "answer": prompt.answer,
            "metadata": prompt.metadata,
        }

    def _of_many(self, prompt: PromptText, responses: Sequence[str]) -> dict[str, Any]:
        count = len(responses)
        return {
            **{name: [value] * count for name, value in prompt.metadata.items()},
            "prompts": [prompt.text] * count,
            "responses": list(responses),
            "answers": [prompt.answer] * count,
            "metadata": [prompt.metadata] * count,
        }


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_scorer(file: str, function: str, *, base_dir: Path, key: str) -> PythonScorer:
    """The function called `function` in `file`, a path relative to `base_dir`.

    Raises UserError, with file and line, when it cannot be had or called by keyword.
    """
    return PythonScorer(
        load_function(file, function, base_dir=base_dir, key=key, kind="reward function", needs="response")
    )
