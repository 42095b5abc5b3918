"""What every command of the command line is made of."""

import argparse
from collections.abc import Callable, Sequence

Commands = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]
"""Where commands are added; argparse has no public name for it."""

Run = Callable[[argparse.Namespace, Sequence[str]], int]
"""Runs a parsed command with the recipe's overrides (`--a.b=v`). Returns the exit status."""


def add_command(
    commands: "Commands[argparse.ArgumentParser]",
    name: str,
    purpose: str,
    *,
    example: str,
    run: Run,
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    """A parser for `ratoon NAME`; `run` is called with what it parsed.

    example: shown below the help, beginning with "example:".
    takes_overrides: keys of the recipe may be set behind the command; elsewhere they are refused.
    """
    parser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run_command=run, takes_overrides=takes_overrides)
    return parser


def positive(text: str) -> int:
    """An argument type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def positive_to(most: int) -> Callable[[str], int]:
    """An argument type: `positive`, and no more than `most`."""

    def parse(text: str) -> int:
        if (number := positive(text)) > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:,}, got {number:,}")
        return number

    return parse
