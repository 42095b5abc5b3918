"""The policy of a run: its weights as the recipe says, or as a checkpoint has them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ratoon.models.adapters import add_adapters, load_adapters, merge_adapters, save_adapters
from ratoon.models.attachment import attach
from ratoon.models.base_model import FrozenBase, base_of, fingerprint_of, remember_base
from ratoon.models.compiled import can_compile, set_compile
from ratoon.models.config import Compile, FreshModelConfig, ModelConfig, Recompute
from ratoon.models.fresh import build_fresh
from ratoon.models.invariant import make_invariant
from ratoon.models.load import DTYPES, cast_weights, load_model_folder, load_policy, move
from ratoon.models.quantised import quantise, round_weights
from ratoon.models.recompute import set_recompute
from ratoon.models.shape import model_shape


def build_policy(
    config: ModelConfig, *, seed: int, device: torch.device | str = "cpu", checkpoint: Path | None = None
) -> PreTrainedModel:
    """A trainable decoder on `device`, attached and ready for packed layouts.

    checkpoint: a folder that `save_policy` wrote for a run of this `config` and `seed`; the weights are then those,
    bit by bit. With adapters the base beneath them is loaded as `config` says, and checked to be the same.
    seed: of a fresh model's weights, and of new adapters.
    `config.recompute` "auto" computes nothing again: who trains chooses first, by the memory at hand.

    Raises UserError for whatever is wrong with the folders, as `load_policy` and `add_adapters` do.
    """
    if checkpoint is not None and config.lora is None:
        model = _load(config, str(checkpoint), gguf_file=None, device=device)
        return set_compile(model, _compile(config, model))
    if config.fresh is not None:
        model, _ = build_fresh(config.fresh, seed)
        cast_weights(model, DTYPES[config.dtype])
        if config.quantization is not None:
            quantise(model, torch.device(device))
        move(model, torch.device(device))
        attach(model, config.attention, batch_invariant=config.batch_invariant)
        set_recompute(model, _recompute(config))
    else:
        assert config.path is not None, "a model config has a path or is fresh"
        model = _load(config, config.path, gguf_file=config.gguf_file, device=device)
    set_compile(model, _compile(config, model))
    if config.lora is None:
        return model
    base = FrozenBase.of(config, seed=seed, fingerprint=fingerprint_of(model))
    if checkpoint is not None:
        FrozenBase.read(checkpoint).check(
            model, "model.fresh" if config.path is None else f"model.path {config.path!r}"
        )
    add_adapters(model, config.lora, seed=seed)
    if config.batch_invariant:
        make_invariant(model)
    remember_base(model, base)
    return model if checkpoint is None else load_adapters(model, checkpoint)


def save_policy_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Writes a policy's adapters and what their base is; `PeftModel.from_pretrained(base, folder)` reads the first."""
    base = base_of(model)
    save_adapters(model, folder, base_path=None if base is None else base.path)
    if base is not None:
        base.write(folder)


def load_merged(folder: Path, *, base_path: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """An ordinary model on the CPU with the adapters of a checkpoint merged into its base.

    Where the run rounded the base's weights, into the rounded ones: those the adapters were trained on.

    base_path: where the base is now, as a recipe's `model.path`, if it moved.
    trust_remote_code: run Python code from the base's folder; what the checkpoint's run was allowed does not count.

    Raises UserError where the base is gone or another.
    """
    base = FrozenBase.read(folder)
    path = base.path if base_path is None else base_path
    if path is None:
        assert base.fresh is not None, "a base has a path or is fresh"
        model, _ = build_fresh(FreshModelConfig(**base.fresh), base.seed)
        cast_weights(model, DTYPES[base.dtype])
    else:
        model = load_model_folder(
            path,
            dtype=base.dtype,
            gguf_file=base.gguf_file,
            rope_is_fixed=True,
            trust_remote_code=trust_remote_code,
        )
    base.check(model, "a fresh model" if path is None else f"the model in {path!r}")
    if base.quantization is not None:
        round_weights(model)
    return merge_adapters(model, folder)


def _recompute(config: ModelConfig) -> Recompute:
    return "none" if config.recompute == "auto" else config.recompute


def _compile(config: ModelConfig, model: PreTrainedModel) -> Compile:
    if config.compile == "auto" and not can_compile(model):
        return "none"
    return config.compile_on(model.device.type, num_experts=model_shape(model.config).num_experts)


def _load(config: ModelConfig, path: str, *, gguf_file: str | None, device: torch.device | str) -> PreTrainedModel:
    return load_policy(
        path,
        dtype=config.dtype,
        device=device,
        impl=config.attention,
        batch_invariant=config.batch_invariant,
        recompute=_recompute(config),
        gguf_file=gguf_file,
        rope_positions=config.rope_positions,
        quantization=config.quantization,
        trust_remote_code=config.trust_remote_code,
    )
