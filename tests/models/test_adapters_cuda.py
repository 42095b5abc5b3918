"""Adapters on a GPU, in the precision of training."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rollout.tiny import byte_tokenizer, make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import LoraConfig, ModelConfig, adapters_off, build_policy, forward_logprobs, load_merged
from ratoon.rollout import RolloutConfig, build_engine
from ratoon.trainer import MasterOptimizer
from ratoon.trainer.model_folder import save_model

pytestmark = pytest.mark.gpu

CONFIG = RolloutConfig(temperature=1.0, max_response_tokens=48)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A small bfloat16 model whose heads the GPU's kernels take."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=258,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            initializer_range=0.05,
            eos_token_id=256,
            pad_token_id=257,
        ),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="bfloat16", lora=LoraConfig(rank=8, alpha=16))


def test_a_run_with_adapters(config: ModelConfig, tmp_path: Path):
    """Sampled, trained, published, saved, resumed and merged; log-probs of both sides agree to bfloat16's rounding."""
    model = build_policy(config, seed=0, device="cuda")
    base = build_policy(config.model_copy(update={"lora": None}), seed=0, device="cuda")
    engine = build_engine(CONFIG, model, byte_tokenizer(), model.device)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95))
    gaps: list[float] = []

    async def run() -> tuple[PackedLayout, Tensor]:
        """The last layout and its log-probs under the base."""
        layout, ref_logprobs_M = pack_groups([]), torch.empty(0)
        for version in range(4):
            calls = [
                engine.generate(prompt, group_size=8, sampling=CONFIG.sampling_params(seed=0), step=version)
                for prompt in make_prompts([40, 90, 7])
            ]
            groups = list(await asyncio.gather(*calls))
            layout = pack_groups(groups)
            logprobs_M, _ = forward_logprobs(model, layout)
            with torch.no_grad(), adapters_off(model):
                ref_logprobs_M, _ = forward_logprobs(model, layout)
            with torch.no_grad():
                assert torch.equal(ref_logprobs_M, forward_logprobs(base, layout)[0])
            recorded = [r.rollout_logprobs for g in groups for r in g.responses if r.rollout_logprobs is not None]
            gap_M = np.abs(np.concatenate(recorded) - logprobs_M.detach().cpu().numpy())
            gaps.append(float(gap_M.mean()))
            sign_M = torch.tensor(np.where(layout.sequence_of_M % 2 == 0, 1.0, -1.0)).to(logprobs_M)
            (-(sign_M * logprobs_M).mean()).backward()
            optimizer.accumulate()
            optimizer.step(learning_rate=5e-3, max_grad_norm=1.0)
            await engine.update_weights(model.state_dict(), version + 1)
        await engine.close()
        return layout, ref_logprobs_M

    layout, ref_logprobs_M = asyncio.run(run())
    assert max(gaps) < 0.02, gaps
    save_model(model, None, tmp_path)
    with torch.no_grad():
        expected_M, _ = forward_logprobs(model, layout)
        assert (expected_M - ref_logprobs_M).abs().mean() > 0.05, "the adapters must show"
        resumed = build_policy(config, seed=0, device="cuda", checkpoint=tmp_path)
        assert torch.equal(forward_logprobs(resumed, layout)[0], expected_M)
        # The checkpoint goes on elsewhere too: the base is known again from the CPU's copy.
        build_policy(config, seed=0, device="cpu", checkpoint=tmp_path)
        load_merged(tmp_path).save_pretrained(tmp_path / "merged")
        merged = build_policy(ModelConfig(path=str(tmp_path / "merged"), dtype="bfloat16"), seed=0, device="cuda")
        assert (forward_logprobs(merged, layout)[0] - expected_M).abs().mean() < 0.05
