"""`ratoon doctor`."""

import argparse
from collections.abc import Sequence

from ratoon.cli.command import Commands, add_command

_EXAMPLE = """\
example:
  ratoon doctor
"""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    add_command(
        commands,
        "doctor",
        "say what is installed, which rollout engines there are and which attention would be used, and why",
        example=_EXAMPLE,
        run=_run,
    )


def _run(_: argparse.Namespace, __: Sequence[str]) -> int:
    from ratoon.cli.installation import report

    print(report())
    return 0
