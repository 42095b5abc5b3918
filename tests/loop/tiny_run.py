"""A recipe that trains in a second, and what two of its runs must agree in."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

RECIPE = """\
[run]
name = "tiny"
output_dir = "{folder}/runs"
[model.fresh]
hidden_size = 32
intermediate_size = 48
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 16
max_positions = 32
alphabet = "abcdefgh"
[data]
source = "words.jsonl"
num_heldout = 3
chat_template = false
[sft]
num_steps = 3
prompts_per_step = 3
[rollout]
prompts_per_step = 2
group_size = 4
max_response_tokens = 6
[reward]
function = "python:reward.py:score"
num_workers = 1
[trainer]
num_steps = 6
learning_rate = 1e-2
checkpoint_every_steps = 2
keep_checkpoints = 9
device = "cpu"
"""

# `trigger` holds how many scores go by before its action; a test of Ctrl-C or of a failure writes it. One worker, a
# child of the run, scores one response after the other.
REWARD = """\
import os
import shutil
import signal
import time
from pathlib import Path

TRIGGER = Path(__file__).with_name("trigger")


def score(response):
    if TRIGGER.exists():
        left, action = TRIGGER.read_text().split()
        if int(left):
            TRIGGER.write_text(f"{int(left) - 1} {action}")
        else:
            TRIGGER.unlink()
            act(action)
    return response.count("a") + 0.1 * len(response)


def act(action):
    if action == "raise":
        raise KeyError("no such\\nverdict")
    if action.startswith("remove:"):
        return shutil.rmtree(action.removeprefix("remove:"))
    if action.startswith("fill:"):
        _, num_bytes_left, path = action.split(":")
        with open(path, "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)) == 4096:
                    pass
            except OSError:
                filler.truncate(filler.tell() // 4096 * 4096 - int(num_bytes_left))
        return None
    for _ in range(2 if action.endswith("-twice") else 1):
        os.kill(os.getppid(), signal.SIGTERM if action.startswith("terminate") else signal.SIGINT)
        time.sleep(0.2)  # two signals at once are one
"""

WORDS = [first + second + third for first in "abcd" for second in "ef" for third in "gh"][:11]
"""11 words: 3 held out, 8 to train on, so that 4 steps of 2 prompts are one epoch."""

SCORES_PER_STEP = 8

VARIANTS = {
    "plain": (),
    "several updates a step": (
        "--algorithm.num_minibatches=2", "--trainer.schedule=cosine", "--trainer.warmup_steps=2",
    ),
    "16 bits": ("--model.dtype=bfloat16", "--trainer.schedule=linear"),
    "reference model": ("--algorithm.kl_coefficient=0.1", "--algorithm.num_minibatches=2"),
    "dynamic sampling": ("--algorithm.name=dapo", "--rollout.group_size=2", "--rollout.temperature=0.3"),
    "adapters and their reference": ("--model.lora.rank=2", "--algorithm.kl_coefficient=0.1"),
    "a penalty in the reward": (
        "--algorithm.name=rloo", "--algorithm.kl_coefficient=0.1", "--planner.share_prompts=false",
    ),
    "everything at once": (
        "--algorithm.name=dapo", "--algorithm.num_minibatches=2", "--algorithm.kl_coefficient=0.1",
        "--algorithm.mask_truncated=true", "--algorithm.mismatch_correction=token-tis", "--model.lora.rank=2",
        "--rollout.top_k=4", "--evaluation.every_steps=1", "--evaluation.keep_best=true",
        "--trainer.keep_checkpoints=1",
    ),
    "two sources by weight": (
        "--data={sources=[{source='words.jsonl',weight=2.0},{source='others.jsonl',weight=1.0}],"
        "num_heldout=3,chat_template=false}",
    ),
    "partial rollouts": (
        "--rollout.max_new_tokens_per_step=2", "--rollout.top_k=5", "--algorithm.mismatch_correction=token-tis",
    ),
    "uneven epochs, every step saved": (
        "--data.num_heldout=4", "--trainer.checkpoint_every_steps=1", "--evaluation.every_steps=2",
    ),
}  # fmt: skip
"""Settings under which a run carries more, or other, state from step to step. The drills of interrupted runs take each:
a setting that brings state of its own is added here."""


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class TinyRun:
    """One recipe in its own folder, run in this process."""

    folder: Path
    main: Callable[[list[str]], Outcome] = field(repr=False)

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.toml"

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "tiny"

    def edit(self, *replacements: tuple[str, str]) -> None:
        text = self.recipe.read_text()
        for old, new in replacements:
            assert old in text, f"{old!r} is not in the recipe"
            text = text.replace(old, new)
        self.recipe.write_text(text)

    def train(self, *arguments: str) -> Outcome:
        return self.main(["train", str(self.recipe), *arguments])

    def trigger(self, *, after_scores: int, action: str) -> None:
        (self.folder / "trigger").write_text(f"{after_scores} {action}")


def write_tiny_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    (folder / "reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": word, "answer": word[::-1], "kind": "word"}) for word in WORDS]
    (folder / "words.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "others.jsonl").write_text("".join(f"{row}\n" for row in rows[5:]).replace('"prompt": "', '"prompt": "h'))


def metrics_rows(run_dir: Path, phase: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == phase]


def rollouts(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: pq.read_table(path).to_pylist() for path in sorted((run_dir / "rollouts").iterdir())}


def traces(run_dir: Path) -> dict[str, Any]:
    """Everything of a run that chance and time on the clock must not change: weights and state bit by bit."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    measured = (
        "step",
        "phase",
        "loss",
        "reward_mean",
        "grad_norm",
        "num_rows",
        "num_generated_tokens",
        "learning_rate",
    )
    return {
        "checkpoint": newest.name,
        "files": {
            str(path.relative_to(newest)): path.read_bytes()
            for path in sorted(newest.rglob("*"))
            if path.suffix == ".safetensors" or path.name == "position.json"
        },
        "rollouts": rollouts(run_dir),
        "metrics": [
            {name: row.get(name) for name in measured}
            for phase in ("sft", "train", "evaluate")
            for row in metrics_rows(run_dir, phase)
        ],
    }


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file's time of change and bytes, but for the log and the lock, which every command writes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("run.log", "lock")
    }
