"""`ratoon export`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.types.errors import UserError

_EXAMPLE = """\
example:
  ratoon export runs/quickstart exported
  python -c "from transformers import AutoModelForCausalLM as A; A.from_pretrained('exported')"
"""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "export", "write a trained policy as a Hugging Face model folder", example=_EXAMPLE, run=_run
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet, or is empty")


def _run(known: argparse.Namespace, _: Sequence[str]) -> int:
    from ratoon.trainer.export import export_checkpoint

    try:
        checkpoint = export_checkpoint(known.run, known.out, warn=_warn)
    except OSError as error:
        raise UserError(
            f"{known.run} cannot be exported to {known.out} ({error.strerror}: {error.filename}); "
            "give a folder that can be written"
        ) from None
    print(f"Exported {checkpoint} to {known.out}; AutoModelForCausalLM.from_pretrained({str(known.out)!r}) loads it.")
    return 0


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
