"""What a rollout server cannot do as a recipe has it."""

import torch.distributed as dist

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.http.link import api_key
from ratoon.rollout.engines.http.process import find_program
from ratoon.types import SamplingParams, UserError

_LEAST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones to the first without a word, and its server refuses higher ones than the second."""


def check_settings(config: RolloutConfig) -> None:
    """Raises UserError for what a server cannot do as the recipe has it."""
    if not config.server.is_given:
        raise UserError(
            f"rollout.engine = {config.engine!r} needs [rollout.server] with url (of a server that runs) or command "
            "(that starts one)"
        )
    check_sampling(config.engine, config.sampling_params(seed=0))
    if num_ranks() > 1 and config.server.url is not None:
        raise UserError(
            f"rollout.server.url is of one server, and this run has {num_ranks()} processes, each of which gives its "
            "own server its weights; give rollout.server.command, which starts one for each, or train in one process"
        )
    if config.cache_tokens is not None:
        raise UserError(
            f"rollout.cache_tokens does not act on rollout.engine = {config.engine!r}, whose server has its own option "
            "for it; remove it"
        )


def check_sampling(engine: str, sampling: SamplingParams) -> None:
    """Raises UserError for draws that could not be trained on exactly, or are refused by the server one by one."""
    if sampling.temperature and sampling.is_truncated:
        raise UserError(
            f"rollout.engine = {engine!r} does not say which tokens top_p, top_k and min_p kept for each token, and "
            'training must score each among these: set them to 1, 0 and 0, or use rollout.engine = "transformers"'
        )
    if sampling.temperature and not _LEAST_TEMPERATURE <= sampling.temperature <= _HIGHEST_TEMPERATURE:
        raise UserError(
            f"rollout.engine = {engine!r} draws at temperatures from {_LEAST_TEMPERATURE:g} to "
            f"{_HIGHEST_TEMPERATURE:g}, as vLLM's server does; got {sampling.temperature:g}"
        )


def check_here(config: RolloutConfig) -> None:
    """Raises UserError where the program that starts the server, or the key for it, is not on this machine."""
    if config.server.command:
        find_program(config.server.command[0])
    api_key(config.server)


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
