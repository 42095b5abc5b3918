"""Scorers of one response, and the reward function that asks one for every response of a group."""

import copy
import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ratoon.data import generators
from ratoon.data.rows import cause_of
from ratoon.rewards.checks import checked_reward
from ratoon.rewards.config import EXACT_MATCH, REASONING_GYM, Extract
from ratoon.rewards.extraction import extract_answer, number_value
from ratoon.rewards.time_limit import TimeLimitedCalls, TimeLimitError
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt, Response

_log = logging.getLogger(__name__)


class Scorer(Protocol):
    """Scores one response."""

    def __call__(self, prompt: Prompt, response: Response) -> object:
        """What ought to be one finite number; the caller checks."""
        ...


class ScoreEach:
    """A RewardFn that scores the responses of a group one by one, each within a time limit.

    Any failure ends the run with a UserError that names the function, the prompt, the response and the cause.
    """

    def __init__(self, name: str, scorer: Scorer, *, timeout_s: float, score_truncated: bool = True) -> None:
        """score_truncated: False gives 0 to responses that the token budget cut, unseen."""
        self.name = name
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._calls = TimeLimitedCalls(f"reward {name}")
        self._score_truncated = score_truncated

    def __repr__(self) -> str:
        return f'reward "{self.name}"'

    def __call__(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        return [self._score(prompt, response, index) for index, response in enumerate(responses)]

    def _score(self, prompt: Prompt, response: Response, index: int) -> float:
        if response.is_truncated and not self._score_truncated:
            return 0.0
        where = f"{self!r} of prompt {prompt.id!r}, response {index},"
        try:
            value = self._calls(lambda: self._scorer(prompt, response), timeout_s=self._timeout_s)
        except TimeLimitError:
            raise UserError(
                f"{where} did not return within reward.timeout_s = {self._timeout_s:g} s; "
                f"raise the limit, or mend the function for this response: {response.text[:200]!r}"
            ) from None
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # exit() and asyncio.CancelledError too
            raise UserError(f"{where} failed: {cause(error)}") from error
        return checked_reward(value, where)


def cause(error: BaseException) -> str:
    """Type, message and the innermost place of an error."""
    text = cause_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


class ExactMatch:
    """1.0 where the answer equals the prompt's, else 0.0; numbers are compared by value."""

    def __init__(self, extract: Extract) -> None:
        self._extract: Extract = extract

    def __call__(self, prompt: Prompt, response: Response) -> float:
        wanted = self.reference(prompt)
        given = extract_answer(response.text, self._extract)
        if given is None:
            return 0.0
        if self._extract == "last-number" and (value := number_value(given)) is not None:
            return float(value == number_value(wanted))
        return float(given == wanted)

    def reference(self, prompt: Prompt) -> str:
        """What a right response holds. Raises UserError if the prompt does not say."""
        if prompt.answer is None:
            raise UserError(
                f'reward.function "{EXACT_MATCH}" needs answers, but prompt {prompt.id!r} has none; '
                "set data.answer_column, or score with a function that needs none"
            )
        if self._extract != "last-number":
            return prompt.answer.strip()
        wanted = extract_answer(prompt.answer, "last-number")
        if wanted is None:
            raise UserError(
                f'reward.extract = "last-number", but the answer of prompt {prompt.id!r} holds no number: '
                f'{prompt.answer[:200]!r}; use "text" or "answer-tag"'
            )
        return wanted


class ReasoningGym:
    """The score, mostly in [0, 1], that the task's own verifier gives; it may give part of it for a near miss."""

    def __init__(self, extract: Extract) -> None:
        self._extract: Extract = extract
        self._verifiers: dict[str, Any] = {}
        self._has_warned = False

    def __call__(self, prompt: Prompt, response: Response) -> object:
        verifier = self.verifier(prompt)
        entry = {"question": prompt.text, "answer": prompt.answer, **copy.deepcopy(dict(prompt.metadata))}
        given = extract_answer(response.text, self._extract)
        if given is None:
            return 0.0
        try:
            return verifier.score_answer(given, entry)
        except Exception as error:
            # Some verifiers parse without a guard (prime_factorization calls int()): what they cannot read is wrong.
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "reasoning-gym's verifier failed on prompt %r, which scores 0 (said once): %s; response: %r",
                    prompt.id,
                    cause(error),
                    given[:200],
                )
            return 0.0

    def verifier(self, prompt: Prompt) -> Any:
        """The dataset object that scores the prompt's entry, with the options that made it."""
        name, options = _origin(prompt)
        key = json.dumps([name, options], sort_keys=True, default=repr)
        if key not in self._verifiers:
            self._verifiers[key] = generators.create_generator(name, options, size=1, seed=0)
        return self._verifiers[key]


def _origin(prompt: Prompt) -> tuple[str, Mapping[str, Any]]:
    """Generator and options of a prompt; a file may hold entries too, made with the default options."""
    match prompt.metadata:
        case {generators.GENERATOR_KEY: str(name), generators.OPTIONS_KEY: Mapping() as options}:
            return name, options
        case {"metadata": {"source_dataset": str(name)}}:
            return name, {}
    raise UserError(
        f'reward.function "{REASONING_GYM}" scores what data.source "reasoning-gym:NAME" generates, but prompt '
        f"{prompt.id!r} has no {generators.GENERATOR_KEY!r} and {generators.OPTIONS_KEY!r}, nor metadata "
        "with a 'source_dataset'; use another reward.function for this data"
    )
