"""Parses the command line and runs one command. Importing this loads neither torch nor transformers."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence

import ratoon
from ratoon.cli import bench, data, doctor, evaluate, export, init, plan, train
from ratoon.cli.complaint import complain
from ratoon.cli.launch import is_first_of_host
from ratoon.types.errors import UserError

EXIT_INTERRUPTED = 130

_OVERRIDE = re.compile(r"--[^=.]+\.")
"""A dotted key of the recipe: no option of a command has a dot before its `=`."""

_COMMANDS = (train, evaluate, plan, init, data, export, doctor, bench)
"""In the order of the help. Each module has `register`, and imports what is heavy when it runs."""

_EXAMPLE = """\
example:
  ratoon doctor
  ratoon train recipes/quickstart.toml

`ratoon COMMAND --help` shows more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0 done, 2 something the user must change, 3 a run ended by one of its `[stop]` rules, 130 stopped by Ctrl-C,
    143 by SIGTERM, 1 anything else.
    """
    _fill_closed_streams()
    # Read when tqdm is imported: libraries' bars would run across our own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Read when torch is imported. Threads that wait by spinning take ten times as long on a machine that runs anything
    # else, and gain 4 % on an idle one (benchmarks/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    overrides, given = _split_overrides(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    known, unknown = parser.parse_known_args(given)
    if not known.takes_overrides and (overrides or unknown):
        parser.error(f"unrecognized arguments: {' '.join([*overrides, *unknown])}")
    try:
        status = known.run_command(known, [*overrides, *unknown])
        if not sys.stdout.closed:  # by a function of the user
            sys.stdout.flush()
        return status
    except UserError as error:
        complain(known.command, error)
        return 2
    except KeyboardInterrupt:
        if not is_first_of_host():  # of the ranks that one Ctrl-C ends, one says so
            return EXIT_INTERRUPTED
        resume = "; the same command goes on from the last checkpoint" if known.command == "train" else ""
        complain(known.command, f"stopped{resume}")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; Python's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            # As above: what Python still holds of the output cannot be written either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            complain(known.command, "the output cannot be written: no space left where it goes; free some")
            return 2
        if error.errno != errno.ENAMETOOLONG:
            raise
        complain(known.command, f"{str(error.filename)[:80]}... is a longer path than the system takes; shorten it")
        return 2


def _fill_closed_streams() -> None:
    """Python has None for a stream that the shell closed (`>&-`), and the next file opened would take its number."""
    for name in ("stdin", "stdout", "stderr"):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (until the end)


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides `--a.b=v` and `--a.b v`, everything else): argparse would take the `v` before a recipe for it."""
    overrides: list[str] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not _OVERRIDE.match(argument):
            others.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return overrides, others


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ratoon",
        description="Reinforcement learning for language models, with every shared prompt computed once.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ratoon {ratoon.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for module in _COMMANDS:
        module.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
