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
    parser.add_argument("--best", action="store_true", help="of a run: its best checkpoint instead of the newest")
    parser.add_argument(
        "--adapter", action="store_true", help="of a LoRA run: write the adapters alone, instead of the merged model"
    )
    parser.add_argument("--base", metavar="FOLDER", help="of a LoRA run: where its base model lies, if it was moved")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="of a LoRA run: run Python code from the base model's folder"
    )


def _run(known: argparse.Namespace, _: Sequence[str]) -> int:
    from transformers.utils.logging import disable_progress_bar

    from ratoon.trainer.best_checkpoint import best_checkpoint
    from ratoon.trainer.export import AdapterExport, export_checkpoint

    disable_progress_bar()  # transformers would draw one for each file
    adapters = None
    if known.adapter or known.base is not None or known.trust_remote_code:
        if known.adapter and (known.base is not None or known.trust_remote_code):
            raise UserError("--adapter writes the adapters alone and reads no base model; drop --base and the like")
        adapters = AdapterExport(
            is_merged=not known.adapter, base_path=known.base, trust_remote_code=known.trust_remote_code
        )
    try:
        source = best_checkpoint(known.run, warn=_warn) if known.best else known.run
        checkpoint = export_checkpoint(source, known.out, adapters=adapters, warn=_warn)
    except OSError as error:
        raise UserError(
            f"{known.run} cannot be exported to {known.out} ({error.strerror}: {error.filename}); "
            "give a folder that can be written"
        ) from None
    reader = "PeftModel.from_pretrained(BASE, {!r})" if known.adapter else "AutoModelForCausalLM.from_pretrained({!r})"
    print(f"Exported {checkpoint} to {known.out}; {reader.format(str(known.out))} loads it.")
    return 0


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
