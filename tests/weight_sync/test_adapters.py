"""A policy with adapters samples with them, sync after sync."""

import asyncio

import numpy as np
import pytest
import torch
from tests.rollout.tiny import byte_tokenizer, make_prompts, tiny_qwen3
from transformers import PreTrainedModel, Qwen3ForCausalLM

from ratoon.layout import pack_groups
from ratoon.models import LoraConfig, adapters_off, add_adapters, attach, forward_logprobs
from ratoon.rollout import RolloutConfig, build_engine
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.rollout.errors import RolloutError
from ratoon.trainer import MasterOptimizer
from ratoon.types import RolloutGroup
from ratoon.weight_sync import publish

NUM_SYNCS = 4
CONFIG = RolloutConfig(temperature=0.7, max_response_tokens=12)


def adapted() -> PreTrainedModel:
    config = tiny_qwen3().config
    config.attention_dropout = 0.0
    return add_adapters(attach(Qwen3ForCausalLM(config)), LoraConfig(rank=4, alpha=8), seed=0)


def recorded(groups: list[RolloutGroup]) -> np.ndarray:
    parts = [response.rollout_logprobs for group in groups for response in group.responses]
    return np.concatenate([part for part in parts if part is not None])


def test_rollout_logprobs_are_the_trainers_after_every_sync():
    """verl#7904: output was garbled from the second sync on, where adapters were merged for the engine and the base
    was not restored. verl#6813, #7083: corrupt weights after a sync. Here nothing is merged: the engine reads the
    adapters that the optimizer writes, and scoring the reference in between does not switch the engine's off."""
    torch.set_num_threads(1)
    model = adapted()
    base = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    engine = build_engine(CONFIG, model, byte_tokenizer(), model.device)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95))
    prompts = make_prompts([3, 20, 7])
    gaps: list[float] = []
    distances: list[float] = []

    async def run() -> None:
        for version in range(NUM_SYNCS + 1):
            with adapters_off(model):  # as a reference model is scored, at any time
                calls = [
                    engine.generate(prompt, group_size=4, sampling=CONFIG.sampling_params(seed=0), step=version)
                    for prompt in prompts
                ]
                groups = list(await asyncio.gather(*calls))
            layout = pack_groups(groups)
            logprobs_M, _ = forward_logprobs(model, layout, CONFIG.temperature)
            with torch.no_grad(), adapters_off(model):
                ref_logprobs_M, _ = forward_logprobs(model, layout, CONFIG.temperature)
            gaps.append(float(np.abs(recorded(groups) - logprobs_M.detach().numpy()).max()))
            distances.append(float((logprobs_M.detach() - ref_logprobs_M).abs().max()))
            sign_M = torch.tensor(np.where(layout.sequence_of_M % 2 == 0, 1.0, -1.0)).to(logprobs_M)
            (-(sign_M * logprobs_M).mean()).backward()
            optimizer.accumulate()
            optimizer.step(learning_rate=0.02, max_grad_norm=1.0)
            await publish(model.state_dict(), version + 1, [engine], timeout_s=60.0)
        await engine.close()

    asyncio.run(run())
    assert max(gaps) < 2e-5, gaps
    assert distances[0] == 0.0 and min(distances[1:]) > 0.05, "each sync must bring adapters that show"
    for name, value in base.items():
        assert torch.equal(model.get_parameter(name), value), f"the frozen {name} moved"


def test_the_twin_shares_adapters_and_keeps_its_own_switch():
    model = adapted()
    twin = twin_of(model, "sdpa")
    own = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert parameter is own[name]
    with torch.no_grad():
        for name, parameter in own.items():
            if "lora_B" in name:
                parameter.normal_()
    ids = torch.tensor([[5, 6, 7]])

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return twin(input_ids=ids).logits

    expected = logits()
    with adapters_off(model):
        assert torch.equal(logits(), expected)
        with pytest.raises(RolloutError, match=r"adapters are off, and the engine would sample from the base"):
            twin_of(model, "sdpa")
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in own.items())
