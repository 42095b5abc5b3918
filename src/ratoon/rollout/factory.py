"""Which engine a recipe gets."""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.models.interface import is_batch_invariant
from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engine import RolloutEngine
from ratoon.rollout.errors import TESTED_TRANSFORMERS, RolloutError
from ratoon.rollout.model_checks import check_batch_invariant
from ratoon.types import SamplingParams, UserError


def check_engine(config: RolloutConfig, *samplings: SamplingParams) -> None:
    """Raise UserError for what `build_engine` would refuse whatever the model, and for what the engine could not draw.

    samplings: that it will be asked for, beside those of `config`. Loads no engine's packages.
    """
    if config.engine == "vllm":
        from ratoon.rollout.engines.vllm import refusals as of_vllm
        from ratoon.rollout.engines.vllm.versions import check_vllm

        check_vllm()
        of_vllm.check_recipe(config)
        for sampling in samplings:
            of_vllm.check_sampling(sampling)
    if config.engine in ("vllm-server", "sglang-server"):
        if find_spec("httpx") is None:
            raise UserError(f"rollout.engine = {config.engine!r} needs the package httpx: pip install httpx")
        from ratoon.rollout.engines.http import refusals as of_servers

        of_servers.check_settings(config)
        of_servers.check_here(config)
        for sampling in samplings:
            of_servers.check_sampling(config.engine, sampling)


def build_engine(
    config: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str | None = None,
    run_dir: Path | None = None,
) -> RolloutEngine:
    """The engine `config.engine` names, or is on the model's device.

    model: the trainer's, attached or not, on the device it trains on. The `transformers` and `paged` engines share its
    parameters: build it after the last change to the model's modules, and it follows the optimizer from then on.
    device: checked against the model's where it is given. run_dir: takes the log of a server that the engine starts.
    """
    check_engine(config)
    is_invariant = is_batch_invariant(model)
    if is_invariant:
        check_batch_invariant(config)
    is_quantised = any(not parameter.is_floating_point() for parameter in model.parameters())
    name = config.engine_on(model.device.type, is_quantised=is_quantised, is_batch_invariant=is_invariant)
    if name == "paged":
        from ratoon.rollout.engines.paged.engine import PagedEngine
        from ratoon.rollout.engines.shared_weights import check_device

        check_device(device, model)
        return PagedEngine(config, model, tokenizer)
    if name == "transformers":
        from ratoon.rollout.engines.shared_weights import check_device

        check_device(device, model)
        try:
            from ratoon.rollout.engines.transformers import TransformersEngine
        except ImportError as error:
            raise RolloutError(
                f"transformers' continuous batching is not where it was in {TESTED_TRANSFORMERS}, the tested range: "
                f"{error}; install a transformers of that range"
            ) from error
        return TransformersEngine(config, model, tokenizer)
    if name == "vllm":
        from ratoon.rollout.engines.vllm.versions import TESTED, check_vllm

        found = check_vllm()
        from ratoon.rollout.engines.vllm.engine import VllmEngine

        try:
            return VllmEngine(config, model, tokenizer)
        except ImportError as error:
            raise RolloutError(
                f"vllm {found} cannot be imported, or is built otherwise than {TESTED}, the tested version: {error}"
            ) from error
    if name in ("vllm-server", "sglang-server"):
        from ratoon.rollout.engines.http.engine import ServerEngine

        return ServerEngine(config, model, tokenizer, run_dir)
    raise ValueError(f"rollout.engine names no engine, got {name!r}; build_engine knows those of RolloutConfig")
