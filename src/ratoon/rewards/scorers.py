"""The built-in scorers of one response. Workers hold them."""

import json
import re
import traceback
from collections.abc import Mapping
from typing import Any, Protocol

from ratoon.data import generators
from ratoon.data.rows import cause_of
from ratoon.rewards.components import EXACT_MATCH, REASONING_GYM, ComponentSpec, PromptText
from ratoon.rewards.extraction import Extract, extract_answer, number_value
from ratoon.types.errors import UserError


class Scorer(Protocol):
    """Scores one response, or all responses of a prompt at once."""

    is_batch: bool
    """Called once for a prompt with a list of texts, and returns one number for each."""

    is_async: bool
    """Returns an awaitable; several may run at once."""

    def check(self, prompt: PromptText) -> None:
        """Raises UserError, naming the prompt, where it lacks what the scorer needs."""
        ...

    def __call__(self, prompt: PromptText, response: Any) -> object:
        """What ought to be one finite number, or one for each response; the worker checks."""
        ...


class UnreadableError(Exception):
    """A verifier could not make sense of a response, which therefore scores 0. The message is the cause."""


class GivenUpError(Exception):
    """A coroutine did not return within its time limit."""


def cause(error: BaseException) -> str:
    """Type, message and the innermost place of an error."""
    text = cause_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


class ExactMatch:
    """1.0 where the answer equals the prompt's, else 0.0; numbers are compared by value."""

    is_batch = is_async = False

    def __init__(self, spec: ComponentSpec) -> None:
        self._key = spec.key
        self._extract: Extract = spec.extract

    def check(self, prompt: PromptText) -> None:
        self._reference(prompt)

    def __call__(self, prompt: PromptText, response: str) -> float:
        wanted = self._reference(prompt)
        given = extract_answer(response, self._extract)
        if given is None:
            return 0.0
        if self._extract == "last-number" and (value := number_value(given)) is not None:
            return float(value == number_value(wanted))
        return float(given == wanted)

    def _reference(self, prompt: PromptText) -> str:
        """What a right response holds."""
        answer = answer_of(prompt, self._key, EXACT_MATCH)
        if self._extract == "boxed":  # datasets with worked solutions box their answers too
            return extract_answer(answer, "boxed") or answer.strip()
        if self._extract != "last-number":
            return answer.strip()
        wanted = extract_answer(answer, "last-number")
        if wanted is None:
            raise UserError(
                f'reward.extract = "last-number", but the answer of prompt {prompt.id!r} holds no number: '
                f'{answer[:200]!r}; use "text" or "answer-tag"'
            )
        return wanted


def answer_of(prompt: PromptText, key: str, kind: str) -> str:
    """The prompt's answer. Raises UserError if it has none."""
    if prompt.answer is None:
        raise UserError(
            f'{key} "{kind}" needs answers, but prompt {prompt.id!r} has none; '
            "set data.answer_column, or score with a function that needs none"
        )
    return prompt.answer


class ReasoningGym:
    """The score, mostly in [0, 1], that the task's own verifier gives; it may give part of it for a near miss."""

    is_batch = is_async = False

    def __init__(self, spec: ComponentSpec) -> None:
        generators.import_reasoning_gym(spec.key)
        self._key = spec.key
        self._extract: Extract = spec.extract
        self._verifiers: dict[str, Any] = {}

    def check(self, prompt: PromptText) -> None:
        self._verifier(prompt)

    def __call__(self, prompt: PromptText, response: str) -> object:
        verifier = self._verifier(prompt)
        given = extract_answer(response, self._extract)
        if given is None:
            return 0.0
        entry = {"question": prompt.text, "answer": prompt.answer, **prompt.metadata}
        try:
            return verifier.score_answer(given, entry)
        except Exception as error:
            # Some verifiers parse without a guard (prime_factorization calls int()): what they cannot read is wrong.
            raise UnreadableError(cause(error)) from error

    def _verifier(self, prompt: PromptText) -> Any:
        """The dataset object that scores the prompt's entry, with the options that made it."""
        name, options = self._origin(prompt)
        key = json.dumps([name, options], sort_keys=True, default=repr)
        if key not in self._verifiers:
            self._verifiers[key] = generators.create_generator(name, options, size=1, seed=0)
        return self._verifiers[key]

    def _origin(self, prompt: PromptText) -> tuple[str, Mapping[str, Any]]:
        """Generator and options of a prompt; a file may hold entries too, made with the default options."""
        match prompt.metadata:
            case {generators.GENERATOR_KEY: str(name), generators.OPTIONS_KEY: Mapping() as options}:
                return name, options
            case {"metadata": {"source_dataset": str(name)}}:
                return name, {}
        raise UserError(
            f'{self._key} "{REASONING_GYM}" scores what data.source "reasoning-gym:NAME" generates, but prompt '
            f"{prompt.id!r} has no {generators.GENERATOR_KEY!r} and {generators.OPTIONS_KEY!r}, nor metadata "
            "with a 'source_dataset'; use another reward.function for this data"
        )


class Regex:
    """1.0 where the pattern matches, else 0.0."""

    is_batch = is_async = False

    def __init__(self, spec: ComponentSpec) -> None:
        pattern = re.compile(spec.pattern)
        self._matches = pattern.fullmatch if spec.match == "full" else pattern.search
        self._extract: Extract = spec.extract

    def check(self, prompt: PromptText) -> None:
        pass

    def __call__(self, prompt: PromptText, response: str) -> float:
        given = extract_answer(response, self._extract)
        return 0.0 if given is None else float(self._matches(given) is not None)


class Format:
    """1.0 where the response is the tags, each once, closed and in order, with only white space around them."""

    is_batch = is_async = False

    def __init__(self, spec: ComponentSpec) -> None:
        self._tags = spec.tags

    def check(self, prompt: PromptText) -> None:
        pass

    def __call__(self, prompt: PromptText, response: str) -> float:
        first = f"<{self._tags[0]}>"
        # Chat templates of reasoning models open the first tag at the end of the prompt.
        text = first + response if prompt.text.rstrip().endswith(first) else response
        position = 0
        for tag in self._tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            start, end = text.find(opening, position), text.find(closing, position)
            if start < 0 or end < start or text[position:start].strip():
                return 0.0
            if text.count(opening) > 1 or text.count(closing) > 1:
                return 0.0
            position = end + len(closing)
        return float(not text[position:].strip())
