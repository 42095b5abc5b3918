"""Prompts that a step takes more than once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ratoon.types.rollouts import Prompt


def tell_apart(prompts: Sequence[Prompt], seen: Counter[str | int] | None = None) -> tuple[Prompt, ...]:
    """The prompts, the second and later ones of one id renamed `ID#2`, `ID#3`, ...

    A step takes a prompt again where it spans the end of an epoch. Draws depend on step, prompt id and index: under
    one id, both groups would hold the same responses.

    seen: how often each id was taken in this step before, where it takes prompts more than once; is counted on.
    """
    seen = Counter() if seen is None else seen
    told_apart: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.id] += 1
        occurrence = seen[prompt.id]
        told_apart.append(prompt if occurrence == 1 else replace(prompt, id=f"{prompt.id}#{occurrence}"))
    return tuple(told_apart)
