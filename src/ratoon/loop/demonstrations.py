"""The texts that the supervised warm start imitates."""

from collections.abc import Sequence
from pathlib import Path

from ratoon.data.rows import cause_of, short_repr
from ratoon.data.user_function import load_function, python_target
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt

_ALWAYS_KNOWN = ("prompt", "answer", "metadata")


def demonstrations_of(source: str | None, prompts: Sequence[Prompt], *, base_dir: Path) -> tuple[str, ...]:
    """One text for each prompt, as `sft.demonstrations` says; an empty one where a prompt has none.

    source: None for the prompts' own answers, `column:NAME`, or `python:FILE.py:FUNCTION` relative to `base_dir`.
    Raises UserError where a column or a text is missing, or the function fails.
    """
    if source is None:
        return tuple(prompt.answer or "" for prompt in prompts)
    target = python_target(source)
    texts = (
        [prompt.metadata.get(source.removeprefix("column:")) for prompt in prompts]
        if target is None
        else _call_for_each(*target, prompts, base_dir)
    )
    for prompt, text in zip(prompts, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise UserError(
                f"sft.demonstrations = {source!r} gives {short_repr(text)} for prompt {prompt.id!r}; "
                "each prompt needs a text to imitate"
            )
    return tuple(text for text in texts if isinstance(text, str))


def _call_for_each(file: str, function: str, prompts: Sequence[Prompt], base_dir: Path) -> list[object]:
    demonstrate = load_function(
        file, function, base_dir=base_dir, key="sft.demonstrations", kind="demonstration function", needs="prompt"
    )
    texts: list[object] = []
    for prompt in prompts:
        demonstrate.check_names(_ALWAYS_KNOWN, prompt.metadata, f"prompt {prompt.id!r}")
        known = {**prompt.metadata, "prompt": prompt.text, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
        try:
            texts.append(demonstrate(known))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit() and asyncio.CancelledError too
            raise UserError(f"{demonstrate.label} failed for prompt {prompt.id!r}: {cause_of(error)}") from error
    return texts
