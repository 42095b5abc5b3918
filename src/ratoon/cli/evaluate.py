"""`ratoon eval`."""

import argparse
import json
import math
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.cli.command import Commands, add_command, positive
from ratoon.cli.complaint import complain
from ratoon.config import Recipe, load_recipe
from ratoon.loop.origin import folder_of_files, read_origin
from ratoon.types.errors import UserError

if TYPE_CHECKING:
    from ratoon.loop.evaluation import Evaluation

Table = dict[str, Any]

_EXAMPLE = """\
example:
  ratoon eval runs/quickstart
  ratoon eval runs/digits --best --data test.jsonl --evaluation.group_size=8 --out answers.parquet
  ratoon eval path/to/model --data reasoning-gym:chain_sum --data.size=200 --reward reasoning-gym

A run is evaluated as its own recipe says, on the prompts it holds out unless --data names others. A model folder needs
--data and --reward, or a --recipe that has both. Any key of the recipe can be set as --section.key=value, such as
--evaluation.temperature=0 (greedy) or --rollout.max_response_tokens=1024.
"""

_TEXT_KEYS = ("chat_template", "system_prompt", "prompt_template")
_COLUMN_KEYS = ("prompt_column", "answer_column")
_MODEL_KEYS = ("dtype", "attention", "eos_token", "rope_positions", "trust_remote_code")
_OUT_SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What the first argument names."""

    checkpoint: Path | None
    """None for a model folder."""

    recipe: Path | None
    """The recipe of its run; None for a model folder."""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "eval",
        "measure a run's checkpoint or a model folder: mean reward and pass@k, with confidence intervals",
        example=_EXAMPLE,
        run=_run,
        takes_overrides=True,
    )
    parser.add_argument("subject", type=Path, metavar="RUN_OR_MODEL", help="a run folder, a checkpoint, a model folder")
    parser.add_argument("--data", metavar="SOURCE", help="files or a generator, as data.source of a recipe")
    parser.add_argument("--reward", metavar="FUNCTION", help="as reward.function of a recipe")
    parser.add_argument("--recipe", type=Path, help="take tables, and the folder of relative files, from this recipe")
    parser.add_argument("--best", action="store_true", help="of a run, the best checkpoint instead of the newest")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every response to a .parquet or .jsonl file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _run(known: argparse.Namespace, overrides: Sequence[str]) -> int:
    if known.out is not None:
        _check_out(known.out)
    subject = _subject(known.subject, best=known.best)
    recipe = _recipe(known, subject, overrides)
    heldout_only = known.data is None and subject.recipe is not None and recipe.data.num_heldout > 0
    # After the recipe is known to be good: these imports take seconds.
    from ratoon.loop.model_evaluation import EvaluationTask, evaluate_model
    from ratoon.rollout.errors import RolloutError

    task = EvaluationTask(
        recipe=recipe,
        base_dir=_folder_of_files(known, subject),
        checkpoint=subject.checkpoint,
        heldout_only=heldout_only,
        max_prompts=known.limit,
    )
    try:
        found, groups = evaluate_model(task, warn=_warn)
    except RolloutError as error:
        complain("eval", error)
        return 1
    except UserError as error:
        raise UserError(_said_of_here(str(error), known, subject)) from None
    if known.out is not None:
        from ratoon.trainer.checkpoint import checkpoint_step

        step = None if subject.checkpoint is None else checkpoint_step(subject.checkpoint.absolute())
        _write_out(known.out, step or 0, groups)
    shown = subject.checkpoint or known.subject
    source = ", ".join(one.source for one in recipe.data.each_source()) + (" (held out)" if heldout_only else "")
    if known.json:
        print(_as_json(found, model=str(shown), data=source))
    else:
        print("\n".join([f"Evaluation of {shown}", *_lines(found, recipe, source)]))
        if known.out is not None:
            print(f"  {'responses':<22} {known.out}")
    return 0


def _folder_of_files(known: argparse.Namespace, subject: _Subject) -> Path:
    """What relative files are relative to: the folder of the recipe given, or of the run's while it is there."""
    if known.recipe is not None:
        return folder_of_files(known.recipe)
    origin = None if subject.recipe is None else read_origin(subject.recipe.parent)
    return Path.cwd() if origin is None or not origin.is_dir() else origin


def _said_of_here(text: str, known: argparse.Namespace, subject: _Subject) -> str:
    """The text of an error, with the folder in which files were looked for."""
    if known.recipe is not None:
        return text
    here = "paths are relative to the current folder"
    if subject.recipe is not None:
        origin = read_origin(subject.recipe.parent)
        if origin is not None and origin.is_dir():
            here = (
                f"paths in the run's recipe are relative to {origin}, where it was, and options to the current folder"
            )
        else:
            gone = "" if origin is None else f", because {origin}, where the run's recipe was, is gone"
            here += f"{gone}: start the command in the folder of the run's recipe, or name that recipe with --recipe"
    return text.replace("paths are relative to the recipe", here)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _subject(path: Path, *, best: bool) -> _Subject:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a run folder (runs/NAME), a checkpoint in it, or a model folder")
    if (path / "recipe.toml").is_file():
        from ratoon.trainer.best_checkpoint import best_checkpoint
        from ratoon.trainer.checkpoint import latest_checkpoint

        checkpoint = best_checkpoint(path, warn=_warn) if best else latest_checkpoint(path / "checkpoints", warn=_warn)
        if checkpoint is None:
            raise UserError(f"run {path} has no finished checkpoint yet; train until the first one is written")
        return _Subject(checkpoint=checkpoint, recipe=path / "recipe.toml")
    if best:
        raise UserError(f"--best chooses among the checkpoints of a run, and {path} is no run folder; leave it out")
    if (path / "manifest.json").is_file():
        from ratoon.trainer.checkpoint import find_damage

        damage = find_damage(path)
        if damage is not None:
            raise UserError(f"checkpoint {path} is damaged: {damage}; give another, or the run folder for its newest")
        run_recipe = path.absolute().parent.parent / "recipe.toml"
        if run_recipe.is_file():
            return _Subject(checkpoint=path, recipe=run_recipe)
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{path} holds neither a run (recipe.toml) nor a model (config.json); give another folder")
    return _Subject(checkpoint=None, recipe=None)


def _recipe(known: argparse.Namespace, subject: _Subject, overrides: Sequence[str]) -> Recipe:
    """The recipe of the run, or the one given, with the options laid over it and the overrides over those."""
    path: Path | None = known.recipe or subject.recipe
    table: Table = {"run": {"name": "eval"}}
    if path is not None:
        # Through the loader first: what is wrong in the file itself is said of the file.
        load_recipe(path)
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    _require_data_and_reward(known, table)
    for section in ("sft", "stop"):
        table.pop(section, None)
    for key in ("every_steps", "keep_best"):
        table.get("evaluation", {}).pop(key, None)
    if subject.checkpoint is None:
        model = _without_sections(table.get("model", {}), _MODEL_KEYS)
        table["model"] = {**model, "path": str(known.subject.absolute())}
    elif known.recipe is not None and subject.recipe is not None:
        # The checkpoint is of the run's model, whatever the other recipe trains.
        table["model"] = tomllib.loads(subject.recipe.read_text(encoding="utf-8"))["model"]
    if known.data is not None:
        table["data"] = _data_table(known.data, table.get("data", {}))
    if known.reward is not None:
        table["reward"] = {**_without_functions(table.get("reward", {})), "function": _from_here(known.reward)}
    return _loaded(table, overrides, label="the recipe to evaluate by" if path is None else str(path))


def _require_data_and_reward(known: argparse.Namespace, table: Mapping[str, Any]) -> None:
    missing = [name for name in ("data", "reward") if getattr(known, name) is None and name not in table]
    if missing:
        raise UserError(
            f"{known.subject} is a model folder, which has no {' and no '.join(missing)} of its own; give "
            + " and ".join(f"--{name}" for name in missing)
            + ", or a --recipe that has both"
        )


def _data_table(source: str, before: Mapping[str, Any]) -> Table:
    """Other data, read as the recipe reads its own: the same texts around prompts, and the same columns."""
    is_generator = source.startswith("reasoning-gym:")
    kept = _TEXT_KEYS if is_generator else (*_TEXT_KEYS, *_COLUMN_KEYS)
    return {**_without_sections(before, kept), "source": source if is_generator else str(Path(source).absolute())}


def _without_sections(table: Mapping[str, Any], kept: Sequence[str]) -> Table:
    return {key: table[key] for key in kept if key in table}


def _without_functions(reward: Mapping[str, Any]) -> Table:
    """What holds for any reward function."""
    return _without_sections(reward, ("score_truncated", "timeout_s", "on_failure", "num_workers", "start_timeout_s"))


def _from_here(function: str) -> str:
    """A Python reward's file relative to the current folder, as an option's must be."""
    if not function.startswith("python:"):
        return function
    file, colon, name = function.removeprefix("python:").rpartition(":")
    return f"python:{Path(file).expanduser().absolute()}{colon}{name}"


def _loaded(table: Table, overrides: Sequence[str], *, label: str) -> Recipe:
    import tomli_w

    with tempfile.TemporaryDirectory(prefix="ratoon-eval-") as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
        try:
            return load_recipe(path, overrides)
        except UserError as error:
            raise UserError(str(error).replace(str(path), label)) from None


def _check_out(out: Path) -> None:
    if out.suffix not in _OUT_SUFFIXES:
        raise UserError(f"--out {out} must end in {' or '.join(_OUT_SUFFIXES)}")
    if out.exists():
        raise UserError(f"--out {out} exists; remove it or give another name")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: folder {out.parent} does not exist; make it first")


def _write_out(out: Path, step: int, groups: Sequence[Any]) -> None:
    """The responses as a run writes them, in one file."""
    import pyarrow.parquet as pq

    from ratoon.trainer.rollout_table import write_rollouts

    try:
        with tempfile.TemporaryDirectory(prefix=".ratoon-eval-", dir=out.absolute().parent) as folder:
            table = write_rollouts(Path(folder), step, groups)
            if out.suffix == ".jsonl":
                rows = pq.read_table(table).to_pylist()
                table = table.with_suffix(".jsonl")
                table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            table.rename(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); give a file elsewhere") from None


def _as_json(found: "Evaluation", **about: str) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.metrics().items()
    }
    return json.dumps({**about, **values})


def _lines(found: "Evaluation", recipe: Recipe, source: str) -> list[str]:
    config = recipe.evaluation
    low, high = found.reward_interval
    sampling = config.sampling_params(recipe.rollout.sampling_params(recipe.run.seed))
    prompts = "1 prompt" if found.num_prompts == 1 else f"{found.num_prompts:,} prompts"
    answers = "1 answer" if config.group_size == 1 else f"{config.group_size} answers"
    drawn = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    rows = [
        ("data", f"{source}: {prompts}, {answers} each"),
        ("sampling", f"{drawn}, up to {sampling.max_response_tokens:,} tokens, seed {sampling.seed}"),
        ("mean reward", found.reward_in_words + ("" if math.isnan(low) else f"  (95 %: {low:.3f} to {high:.3f})")),
    ]
    for rate in found.pass_rates:
        few = "" if rate.num_prompts == found.num_prompts else f", {rate.num_prompts:,} prompts"
        rows.append((f"pass@{rate.k}", f"{rate.mean:.3f}  (95 %: {rate.low:.3f} to {rate.high:.3f}{few})"))
    rows += [
        ("passes", f"a reward of at least {config.pass_threshold:g}"),
        ("truncated", f"{found.truncated_fraction:.1%} of the responses"),
        ("response tokens", f"{found.response_tokens_mean:,.1f} on average"),
    ]
    if found.num_lost_responses:
        rows.append(("lost responses", f"{found.num_lost_responses:,}: the engine gave none, or their reward failed"))
    return [f"  {name:<22} {text}" for name, text in rows]
