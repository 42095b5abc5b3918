"""Answers compared as mathematics, by the math-verify package."""

import re
from functools import lru_cache
from typing import Any

from ratoon.rewards.components import MATH_VERIFY, ComponentSpec, PromptText
from ratoon.rewards.extraction import Extract, extract_answer
from ratoon.rewards.scorers import UnreadableError, answer_of, cause
from ratoon.types.errors import UserError
from ratoon.types.extras import install_command

_MARKED = re.compile(r"\$|\\\(|\\\[|\\f?boxed|####")
"""Says where in a text its mathematics stands."""

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_MAX_SECONDS_A_PART = 5


class MathVerify:
    """1.0 where the response's last expression equals the answer in value, else 0.0.

    In a response of free text, LaTeX must be marked as such (`$...$`, `\\boxed{...}`); plain numbers need no mark.
    The answer, and what "answer-tag" or "boxed" extracts, may be bare LaTeX.
    """

    is_batch = is_async = False

    def __init__(self, spec: ComponentSpec, *, timeout_s: float) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise UserError(
                f"{spec.key} needs the math-verify package ({error}); install it with: {install_command('math')}"
            ) from None
        self._library: Any = math_verify
        self._key = spec.key
        self._extract: Extract = spec.extract
        # Its own limit works by an alarm, which the main thread of a worker can have. It is whole seconds, leaves the
        # worker alive where sympy is merely slow, and must fire before the worker is killed.
        self._timeout_s = max(1, min(_MAX_SECONDS_A_PART, int(timeout_s / 4)))
        self._reference = lru_cache(maxsize=4096)(self._parse_bare)

    def check(self, prompt: PromptText) -> None:
        answer = answer_of(prompt, self._key, MATH_VERIFY)
        try:
            if self._reference(answer):
                return
            reason = ""
        except UnreadableError as error:
            reason = f" ({error})"
        raise UserError(
            f"the answer of prompt {prompt.id!r} cannot be read as mathematics{reason}: {answer[:200]!r}; "
            'repair it, or use "exact-match"'
        )

    def __call__(self, prompt: PromptText, response: str) -> float:
        reference = self._reference(answer_of(prompt, self._key, MATH_VERIFY))
        given = extract_answer(response, self._extract)
        if given is None:
            return 0.0
        parsed = self._parse(given) if self._extract == "text" else self._parse_bare(given)
        return float(
            bool(parsed) and self._guarded(self._library.verify, reference, parsed, timeout_name="timeout_seconds")
        )

    def _parse_bare(self, text: str) -> list[Any]:
        """The expressions in a short text that is mathematics, marked or not."""
        if _MARKED.search(text):
            return self._parse(text)
        as_math = f"${text.strip()}$"
        if _WORD.search(text):
            return self._parse(text) or (self._parse(as_math) if "\\" in text else [])
        return self._parse(as_math) or self._parse(text)

    def _parse(self, text: str) -> list[Any]:
        return self._guarded(self._library.parse, text, timeout_name="parsing_timeout")

    def _guarded(self, function: Any, *arguments: Any, timeout_name: str) -> Any:
        try:
            return function(*arguments, raise_on_error=True, **{timeout_name: self._timeout_s})
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # its TimeoutException is no Exception
            raise UnreadableError(cause(error)) from error
