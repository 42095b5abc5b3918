"""The frozen model beneath a run's adapters: what it is, and how to know it again."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ratoon.models.config import Dtype, ModelConfig, Quantization
from ratoon.models.model_files import read_json, resolve_model_path
from ratoon.types import UserError

BASE_FILE = "base_model.json"
"""In a checkpoint with adapters, the `FrozenBase` that they belong to."""

_FINGERPRINT = "_ratoon_fingerprint"

_SAMPLES = 64
"""Elements of each tensor that the fingerprint looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """Where the weights beneath an adapter come from."""

    path: str | None
    """The absolute folder; None for a fresh model."""

    gguf_file: str | None

    fresh: dict[str, Any] | None
    """The fields of the fresh model's `FreshModelConfig`."""

    seed: int
    """Of the fresh model's weights."""

    dtype: Dtype

    fingerprint: str
    """`fingerprint_of` the weights."""

    quantization: Quantization | None = None
    """How the run rounds the weights before it trains on them."""

    @classmethod
    def of(cls, config: ModelConfig, *, seed: int, fingerprint: str) -> "FrozenBase":
        path = None
        if config.path is not None:
            path = str(resolve_model_path(config.path, gguf_file=config.gguf_file).resolve())
        return cls(
            path=path,
            gguf_file=config.gguf_file,
            fresh=None if config.fresh is None else config.fresh.model_dump(mode="json"),
            seed=seed,
            dtype=config.dtype,
            fingerprint=fingerprint,
            quantization=config.quantization,
        )

    @classmethod
    def read(cls, folder: Path) -> "FrozenBase":
        """What `write` wrote. Raises UserError for anything else."""
        file = folder / BASE_FILE
        content = read_json(file)
        try:
            return cls(**content)
        except TypeError as error:
            raise UserError(
                f"{str(file)!r} does not describe a base model ({error}); take a whole checkpoint"
            ) from error

    def write(self, folder: Path) -> None:
        (folder / BASE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def check(self, model: nn.Module, where: str) -> None:
        """Raises UserError if `model`, which has no adapters yet, holds other weights than this one did.

        where: what was loaded, for the message.
        """
        if fingerprint_of(model) != self.fingerprint:
            what = "a fresh model" if self.path is None else repr(self.path)
            raise UserError(
                f"the weights of {where} are not those that the adapter was trained on ({what} in {self.dtype}); "
                "put the same base model back, or begin a new run"
            )


def remember_base(model: nn.Module, base: FrozenBase) -> None:
    """Keeps `base` with the model, for its checkpoints."""
    vars(model)["_ratoon_base"] = base


def base_of(model: nn.Module) -> FrozenBase | None:
    """What `remember_base` kept with the model."""
    return vars(model).get("_ratoon_base")


def remember_fingerprint(model: nn.Module) -> None:
    """For a model whose weights are about to be rounded."""
    vars(model)[_FINGERPRINT] = fingerprint_of(model)


@torch.no_grad()
def fingerprint_of(model: nn.Module) -> str:
    """A digest of every parameter's name, shape and a sample of its elements, bit by bit.

    Reads little, so that it is free for models of any size; tells apart any two models that were trained apart. After
    `remember_fingerprint` it is what it was then.
    """
    remembered = vars(model).get(_FINGERPRINT)
    if remembered is not None:
        return remembered
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        places = torch.arange(_SAMPLES, device=flat.device) * (flat.numel() - 1) // (_SAMPLES - 1)
        sample = flat[places].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
