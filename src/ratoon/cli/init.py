"""`ratoon init`."""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.cli.data_columns import DataLook, look_at_data
from ratoon.cli.recipe_templates import (
    ANSWERLESS_REWARDS_SKELETON,
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
_MOST_HELDOUT = 64
_ROOM_AROUND_PROMPT = 256
"""Tokens for the template around a prompt, and for the response."""


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
    parser.add_argument("--prompt-column", metavar="NAME", help="of --data; else found by what it is called")
    parser.add_argument(
        "--answer-column", metavar="NAME", help='of --data; else found by what it is called; "" for none'
    )
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
    data = _look_at_data(known, task, out)
    files = _files(task, out, data, text=recipe_text(_choices(known, task, data, out, machine)))
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
    for name, column in (("prompt", known.prompt_column), ("answer", known.answer_column)):
        if column is not None and known.data is None:
            raise UserError(f"--{name}-column names a column of your own data; give the file with --data")
    if known.gguf_file is not None and known.model is None:
        raise UserError("--gguf-file names a file inside a model folder; give the folder with --model")
    if known.memory_gib is not None and known.memory_gib <= 0:
        raise UserError(f"--memory-gib must be above 0, got {known.memory_gib:g}")


def _machine_here() -> Machine:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _look_at_data(known: argparse.Namespace, task: Task, out: Path) -> DataLook | None:
    if known.data is None:
        return None
    return look_at_data(
        known.data,
        base_dir=out.parent,
        prompt_column=known.prompt_column,
        answer_column=known.answer_column,
        needs_answer=not task.writes_rewards,
    )


def _choices(known: argparse.Namespace, task: Task, data: DataLook | None, out: Path, machine: Machine) -> Choices:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.stem).strip("-._") or "run"
    is_small = machine == "cpu"
    positions = max(_FRESH_POSITIONS, (data.longest_prompt if data else 0) + _ROOM_AROUND_PROMPT)
    choices = Choices(
        file=shlex.quote(out.name),
        name=name,
        task=task,
        machine=machine,
        source=known.data or task.source,
        columns=None if data is None else (data.prompt_column, data.answer_column),
        is_example=data is None and known.model is None,
        num_heldout=_MOST_HELDOUT if data is None else min(data.num_rows // 10, _MOST_HELDOUT),
        num_steps=60,
        model=ModelChoice(table=FRESH_MODEL.format(positions=positions), chat_template=False),
        prompts_per_step=16,
        group_size=16,
        max_response_tokens=_FRESH_RESPONSE_TOKENS if data else task.example.max_response_tokens,
        max_rows_per_microbatch=max(_FRESH_ROWS, positions),
        learning_rate="1e-3",
    )
    if known.model is None:
        _refuse_conversations(known, data, why="the tiny model that is made without --model has none")
        return choices
    # Reading the model takes torch and transformers.
    from ratoon.cli.model_proposal import model_table, propose

    proposal = propose(known.model, gguf_file=known.gguf_file, machine=machine, memory_gib=known.memory_gib)
    if not proposal.has_chat_template:
        _refuse_conversations(known, data, why=f"the tokenizer of {known.model} has none")
    if not proposal.fits:
        assert proposal.estimate_bytes is not None, "an unknown size counts as fitting"
        print(
            f"warning: training every weight of {known.model} needs about {proposal.estimate_bytes / 2**30:.0f} GiB, "
            f"too much for {proposal.device.total_bytes / 2**30:.0f} GiB; add a [model.lora] table, or take a "
            "smaller model",
            file=sys.stderr,
        )
    return replace(
        choices,
        model=ModelChoice(
            table=model_table(known.model, known.gguf_file, proposal), chat_template=proposal.has_chat_template
        ),
        num_steps=60 if is_small else 200,
        prompts_per_step=8 if is_small else 32,
        group_size=8 if is_small else 16,
        max_response_tokens=min(task.max_response_tokens, 256) if is_small else task.max_response_tokens,
        max_rows_per_microbatch=proposal.max_rows_per_microbatch,
        learning_rate=proposal.learning_rate,
    )


def _refuse_conversations(known: argparse.Namespace, data: DataLook | None, *, why: str) -> None:
    if data is not None and data.is_conversation:
        raise UserError(
            f'column "{data.prompt_column}" of {known.data} holds conversations, which only a chat template can '
            f"render, and {why}; give a chat model with --model, or a column of texts with --prompt-column"
        )


def _files(task: Task, out: Path, data: DataLook | None, *, text: str) -> dict[Path, str]:
    files = {out: text}
    if task.example.rows and data is None:
        files[out.parent / task.source] = task.example_text
    if task.writes_rewards:
        has_answers = data is None or bool(data.answer_column)
        files[out.parent / REWARDS_FILE] = REWARDS_SKELETON if has_answers else ANSWERLESS_REWARDS_SKELETON
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
