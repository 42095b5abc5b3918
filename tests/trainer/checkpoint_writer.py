"""Writes checkpoints one after another until it is killed: `python checkpoint_writer.py FOLDER`."""

import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ratoon.trainer.checkpoint import save_checkpoint

NUM_ELEMENTS = 100_000


def write_model(folder: Path, step: int) -> None:
    """A stand-in for a model's folder: two files."""
    (folder / "config.json").write_text(f'{{"step": {step}}}')
    save_file({"weight": torch.full((NUM_ELEMENTS,), float(step))}, folder / "model.safetensors")


def write(folder: Path, step: int, **keywords: Any) -> Path:
    """Step `step`'s checkpoint; every tensor and number in it is `step`."""
    return save_checkpoint(
        folder,
        step,
        model_writer=lambda partial: write_model(partial, step),
        model_bytes=4 * NUM_ELEMENTS,
        state={"moments": {0: torch.full((NUM_ELEMENTS,), float(step))}, "betas": (0.9, 0.999)},
        position={"epoch": 0, "next_prompt": step},
        **keywords,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for step in count(1):
        write(Path(sys.argv[1]), step)
        print(step, flush=True)
