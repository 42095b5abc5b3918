"""`ratoon data`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.cli.command import Commands, add_command, positive
from ratoon.cli.recipe_file import read_recipe
from ratoon.types.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ratoon.config.recipe import Recipe
    from ratoon.data import PromptSplit
    from ratoon.types.rollouts import Prompt

_EXAMPLE = """\
example:
  ratoon data check recipes/quickstart.toml
  ratoon data check recipes/quickstart.toml --data.max_prompt_tokens 64 --examples 5

Any key of the recipe can be set as --section.key=value; docs/recipes.md lists them.
"""
_SHOWN_CHARACTERS = 2_000
_SHOWN_BAD_ROWS = 20


def register(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "data",
        "look at the data of a recipe before any model loads",
        example=_EXAMPLE,
        run=_check,
        takes_overrides=True,
    )
    check = parser.add_subparsers(dest="data_command", required=True, metavar="check").add_parser(
        "check",
        help="read all of it, report what is there, show a few prompts as the policy reads them, and ask the reward",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    check.add_argument("--examples", type=positive, default=3, metavar="N", help="prompts to show, by default 3")


def _check(known: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Reads tokenizer and data as `ratoon train` would, prints what they hold, and asks whether it can be scored."""
    recipe = read_recipe(known.recipe, overrides)
    # After the recipe is known to be good: these imports take seconds.
    from ratoon.data import load_prompts
    from ratoon.loop.inputs import load_recipe_tokenizer
    from ratoon.rewards import RewardPool

    tokenizer = load_recipe_tokenizer(recipe)
    base_dir = known.recipe.resolve().parent
    _check_rows(recipe, base_dir)
    split = load_prompts(recipe.data, tokenizer, base_dir=base_dir)
    for line in (
        *split.report.lines(),
        *_dedup_lines(recipe, split),
        *_example_lines(split, tokenizer, known.examples),
    ):
        print(line)
    sys.stdout.flush()  # what the reward lacks is said below the data that lacks it
    reward = recipe.reward.model_copy(update={"num_workers": 1})
    with RewardPool(reward, base_dir=base_dir, max_response_tokens=recipe.rollout.max_response_tokens) as rewards:
        rewards.check((*split.train, *split.heldout), split.columns)
    return 0


def _check_rows(recipe: Recipe, base_dir: Path) -> None:
    """Names bad rows all at once. One alone, or all of them, which is a wrong setting, `load_prompts` explains."""
    from ratoon.data import find_bad_rows

    if recipe.data.bad_rows == "drop":
        return
    bad, num_rows = find_bad_rows(recipe.data, base_dir=base_dir)
    if not 1 < len(bad) < num_rows:
        return
    for complaint in bad[:_SHOWN_BAD_ROWS]:
        print(complaint, file=sys.stderr)
    more = f", of which the first {_SHOWN_BAD_ROWS} are shown" if len(bad) > _SHOWN_BAD_ROWS else ""
    raise UserError(
        f'{len(bad):,} of {num_rows:,} rows are bad{more}; mend or remove them, or set data.bad_rows = "drop"'
    )


def _dedup_lines(recipe: Recipe, split: PromptSplit) -> Iterator[str]:
    N, longest = recipe.rollout.group_size, recipe.rollout.max_response_tokens
    ratios = [
        f"{split.report.dedup_ratio(group_size=N, response_tokens=R):.2f} with responses of {R:,} tokens"
        for R in dict.fromkeys((longest, max(longest // 4, 1)))
    ]
    yield f"dedup ratio to expect with rollout.group_size = {N}: {', '.join(ratios)}"


def _example_lines(split: PromptSplit, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[str]:
    """Prompts from the shortest to the longest, decoded from their tokens: what the policy reads, BOS included."""
    chosen = _spread_by_length((*split.train, *split.heldout), count)
    for number, prompt in enumerate(chosen, start=1):
        yield ""
        answer = "no answer" if prompt.answer is None else f"answer {textwrap.shorten(repr(prompt.answer), 80)}"
        yield f"prompt {number} of {len(chosen)}: {prompt.id}, {prompt.num_tokens:,} tokens, {answer}"
        text = str(tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False))
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS]
        yield from (f"  | {line}" for line in shown.split("\n"))
        if len(text) > len(shown):
            yield f"  ... and {len(text) - len(shown):,} more characters"


def _spread_by_length(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    ordered = sorted(prompts, key=lambda prompt: prompt.num_tokens)
    count = min(count, len(ordered))
    places = {round(index * (len(ordered) - 1) / max(count - 1, 1)) for index in range(count)}
    return [ordered[place] for place in sorted(places)]
