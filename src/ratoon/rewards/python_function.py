"""A reward function from the user's own file."""

import asyncio
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.data.user_function import UserFunction, load_function
from ratoon.types.rollouts import Prompt, Response

_ALWAYS_KNOWN = ("prompt", "response", "answer", "metadata")


@dataclass(frozen=True, slots=True)
class PythonScorer:
    """Calls a function with those of its parameters that a prompt and its response can fill.

    `prompt` and `response` are texts, `answer` is text or None, `metadata` is the data row's mapping; any other name
    is one of its keys. A coroutine function runs in an event loop of its own.
    """

    function: UserFunction

    def __call__(self, prompt: Prompt, response: Response) -> object:
        self.check_columns(prompt.metadata, f"prompt {prompt.id!r}")
        result = self.function(
            {
                **prompt.metadata,
                "prompt": prompt.text,
                "response": response.text,
                "answer": prompt.answer,
                "metadata": dict(prompt.metadata),
            }
        )
        return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    def check_columns(self, columns: Collection[str], what: str) -> None:
        """Raises UserError if the function needs something that `what`, with these columns, does not have."""
        self.function.check_names(_ALWAYS_KNOWN, columns, what)


async def _wait_for(result: Any) -> object:
    return await result


def load_scorer(file: str, function: str, *, base_dir: Path) -> PythonScorer:
    """The function called `function` in `file`, a path relative to `base_dir`.

    Raises UserError, with file and line, when it cannot be had or called by keyword.
    """
    return PythonScorer(
        load_function(
            file, function, base_dir=base_dir, key="reward.function", kind="reward function", needs="response"
        )
    )
