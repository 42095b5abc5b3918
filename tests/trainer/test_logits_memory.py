"""A whole step of the trainer never holds the logits of all its tokens.

The op by itself is in tests/ops; here is everything that calls it. slime#2253: the model's own head made fp32 logits of
all rows before the chunked loss saw them. TRL#5349: one trainer had the chunked head and the other had not.
prime-rl#1496, prime-rl#1524, VeOmni#711, xtuner#1555, keys_values#126: trainers and their users in want of it.
"""

# Shape letters: M scored tokens, C channels, V vocabulary.

from typing import Any

import numpy as np
import pytest
import torch
from tests.ops.test_linear_logprob_memory import LargestResult
from tests.trainer.test_trainer import plan
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import single_process
from ratoon.models import attach
from ratoon.ops.logprob import tiling
from ratoon.trainer import MasterOptimizer, Trainer, frozen_reference
from ratoon.types import Prompt, Response, RolloutGroup, SampledSupport

torch.set_num_threads(1)

C, V = 8, 6_000
NUM_LOSS_TOKENS = 4 * 4 * 40


def build_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": C, "intermediate_size": C, "num_hidden_layers": 1}
    return attach(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)))


def make_groups(num_kept: int | None) -> list[RolloutGroup]:
    """num_kept: tokens that each token was drawn among; None for the whole vocabulary."""
    rng = np.random.default_rng(0)

    def response() -> Response:
        token_ids = rng.integers(3, V, 40)
        support = None
        if num_kept is not None:
            kept = [np.union1d(rng.integers(0, V, num_kept), [token]).astype(np.int32) for token in token_ids]
            support = SampledSupport.of(kept)
        return Response(token_ids, rollout_logprobs=np.full(40, -3.0), support=support)

    return [
        RolloutGroup(
            Prompt(f"p{index}", rng.integers(3, V, 20)),
            tuple(response() for _ in range(4)),
            advantages_N=np.array([1.0, -1.0, 0.5, -0.5]),
        )
        for index in range(4)
    ]


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a tile, made small for the test."""
    monkeypatch.setattr(tiling, "CPU_TILE_ROWS", 64)
    monkeypatch.setattr(tiling, "CPU_TILE_BYTES", 64 * 128 * 4)
    return 64 * 128


@pytest.mark.parametrize("num_kept", [None, 8], ids=["whole vocabulary", "truncated"])
def test_no_operation_of_a_step_returns_all_logits(tile: int, num_kept: int | None):
    """Old log-probs, policy with entropy, reference, KL in the reward, optimizer, and the supervised step."""
    model = build_model(0)
    trainer = Trainer(
        model,
        MasterOptimizer(model.parameters(), learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95)),
        algorithm=AlgorithmConfig(num_minibatches=2, kl_coefficient=0.1, entropy_coefficient=0.01),
        temperature=0.7,
        max_grad_norm=1.0,
        data_parallel=single_process(),
        reference=frozen_reference(build_model(1), 0.7),
    )
    groups = make_groups(num_kept)
    with LargestResult() as largest:
        result = trainer.step(plan(groups, 2, max_rows=10_000), learning_rate=1e-3)
        (whole,) = plan(groups, max_rows=10_000)
        trainer.kl_to_reference(whole)
        trainer.supervised_step(whole, learning_rate=1e-3)
    assert result.num_loss_tokens == NUM_LOSS_TOKENS
    assert result.num_microbatches == 2, "half of the tokens at a time"
    assert V * C <= largest.numel <= max(3 * tile, 2 * V * C)
    assert largest.numel < NUM_LOSS_TOKENS / 2 * V / 15


def test_the_models_own_head_would_be_seen(tile: int):
    """Else the test above could not fail: the model's own logits of 160 tokens are over its bound."""
    head = build_model(0).get_output_embeddings()
    assert head is not None
    with LargestResult() as largest, torch.no_grad():
        head(torch.zeros(1, NUM_LOSS_TOKENS // 4, C))
    assert largest.numel == NUM_LOSS_TOKENS // 4 * V > max(3 * tile, 2 * V * C)
