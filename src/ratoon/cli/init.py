"""`ratoon init`."""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.cli.recipe_templates import (
    FRESH_MODEL,
    REWARDS_FILE,
    REWARDS_SKELETON,
    TASKS,
    Choices,
    Machine,
    ModelChoice,
    Task,
    recipe_text,
)
from ratoon.config import load_recipe
from ratoon.data.config import GENERATOR_PREFIX
from ratoon.types.errors import UserError

_EXAMPLE = """\
example:
  ratoon init --list
  ratoon init my-recipe.toml --task math --data problems.jsonl --model path/to/folder --machine gpu

Without --data an example file is written beside the recipe, and without --model the recipe makes a tiny model on the
spot: both run as they are, and are there to be replaced.
"""

_FRESH_POSITIONS = 512
_FRESH_RESPONSE_TOKENS = 32
_FRESH_ROWS = 8_192
_MOST_HELDOUT = 128


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "init", "write a commented recipe for a task and a machine", example=_EXAMPLE, run=_run
    )
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.toml")
    parser.add_argument("--list", action="store_true", help="show the tasks and machines, and write nothing")
    parser.add_argument("--task", choices=tuple(TASKS), default="qa", help="what is trained on (default: qa)")
    parser.add_argument("--machine", choices=("cpu", "gpu"), help="where it runs (default: gpu if there is one)")
    parser.add_argument("--model", metavar="FOLDER", help="a model folder, or package:NAME")
    parser.add_argument("--gguf-file", metavar="FILE", help="a GGUF file inside the model folder")
    parser.add_argument("--data", metavar="FILE", help="your data, relative to the recipe; not with reasoning-gym")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of the machine, if it is not this one")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def _run(known: argparse.Namespace, _: Sequence[str]) -> int:
    if known.list:
        print("\n".join(_listing()))
        return 0
    out: Path | None = known.out
    if out is None or out.suffix != ".toml":
        raise UserError(
            f"`ratoon init` writes a recipe, a .toml file; got {str(out or '')!r}. See `ratoon init --help`"
        )
    _check_options(known)
    task = TASKS[known.task]
    machine: Machine = known.machine or _machine_here()
    files = _files(task, out, data=known.data, text=recipe_text(_choices(known, task, out, machine)))
    _write(files, force=known.force)
    load_recipe(out)  # a recipe that does not load would be our mistake
    print(f"Wrote {', '.join(str(path) for path in files)}.")
    print(f"Next: ratoon plan {out}")
    return 0


def _listing() -> list[str]:
    width = max(len(name) for name in TASKS)
    return [
        "tasks (--task):",
        *(f"  {name:<{width}}  {task.purpose}" for name, task in TASKS.items()),
        "machines (--machine):",
        f"  {'cpu':<{width}}  float32, small steps",
        f"  {'gpu':<{width}}  one CUDA GPU, bfloat16",
    ]


def _check_options(known: argparse.Namespace) -> None:
    if known.data is not None and TASKS[known.task].source.startswith(GENERATOR_PREFIX):
        raise UserError(f"--data cannot act on --task {known.task}, which generates its data; choose another task")
    if known.gguf_file is not None and known.model is None:
        raise UserError("--gguf-file names a file inside a model folder; give the folder with --model")
    if known.memory_gib is not None and known.memory_gib <= 0:
        raise UserError(f"--memory-gib must be above 0, got {known.memory_gib:g}")


def _machine_here() -> Machine:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _choices(known: argparse.Namespace, task: Task, out: Path, machine: Machine) -> Choices:
    source = task.source if known.data is None else known.data
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.stem).strip("-._") or "run"
    is_small = machine == "cpu"
    choices = Choices(
        file=shlex.quote(out.name),
        name=name,
        task=task,
        machine=machine,
        source=source,
        num_heldout=_num_heldout(task, out.parent / source, is_generated=source == task.source),
        num_steps=60 if is_small else 200,
        model=ModelChoice(table=FRESH_MODEL.format(positions=_FRESH_POSITIONS), chat_template=False),
        prompts_per_step=8 if is_small else 32,
        group_size=8 if is_small else 16,
        max_response_tokens=_FRESH_RESPONSE_TOKENS,
        max_rows_per_microbatch=_FRESH_ROWS,
        learning_rate="1e-3",
    )
    if known.model is None:
        return choices
    # Reading the model takes torch and transformers.
    from ratoon.cli.model_proposal import model_table, propose

    proposal = propose(known.model, gguf_file=known.gguf_file, machine=machine, memory_gib=known.memory_gib)
    if not proposal.fits:
        assert proposal.estimate_bytes is not None, "an unknown size counts as fitting"
        print(
            f"warning: training every weight of {known.model} needs about {proposal.estimate_bytes / 2**30:.0f} GiB, "
            f"too much for {proposal.memory_bytes / 2**30:.0f} GiB; add a [model.lora] table, or take a "
            "smaller model",
            file=sys.stderr,
        )
    return replace(
        choices,
        model=ModelChoice(
            table=model_table(known.model, known.gguf_file, proposal), chat_template=proposal.has_chat_template
        ),
        max_response_tokens=min(task.max_response_tokens, 256) if is_small else task.max_response_tokens,
        max_rows_per_microbatch=proposal.max_rows_per_microbatch,
        learning_rate=proposal.learning_rate,
    )


def _num_heldout(task: Task, file: Path, *, is_generated: bool) -> int:
    """A tenth of the data, and at most `_MOST_HELDOUT`; 2 of the example rows."""
    if is_generated:
        return _MOST_HELDOUT if not task.examples else 2
    if not file.is_file() or file.suffix != ".jsonl":
        return 0
    with file.open("rb") as lines:
        return min(sum(1 for line in lines if line.strip()) // 10, _MOST_HELDOUT)


def _files(task: Task, out: Path, *, data: str | None, text: str) -> dict[Path, str]:
    files = {out: text}
    if task.examples and data is None:
        files[out.parent / task.source] = task.example_text
    if task.writes_rewards:
        files[out.parent / REWARDS_FILE] = REWARDS_SKELETON
    return files


def _write(files: Mapping[Path, str], *, force: bool) -> None:
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise UserError(f"{', '.join(existing)} exists already; give another name, or overwrite it with --force")
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give a file in a folder that can") from None
