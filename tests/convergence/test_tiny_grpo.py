"""A model of a few thousand weights learns trivial tasks by the real trainer, in seconds and with a fixed seed."""

# Shape letters: N responses of one group, V vocabulary.

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import kept_in_float64
from tests.sampling import sampled
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import single_process
from ratoon.loop.stages import attach_advantages, plan_updates
from ratoon.models import attach, stock_attention
from ratoon.planner import CostModel
from ratoon.rollout.draws import sample_tokens
from ratoon.trainer import MasterOptimizer, Trainer
from ratoon.types import Prompt, Response, RolloutGroup

torch.set_num_threads(1)

VOCAB_SIZE = 12
PROMPT_TOKENS = 6
RESPONSE_TOKENS = 5
NUM_PROMPTS = 6
GROUP_SIZE = 8
TEMPERATURE = 0.8

Reward = Callable[[np.ndarray, np.ndarray], float]


def build_tiny(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return attach(AutoModelForCausalLM.from_config(config, dtype=dtype))


@torch.no_grad()
def draw_groups(model: PreTrainedModel, rng: np.random.Generator) -> list[RolloutGroup]:
    """Groups sampled by transformers' own forward of prompts and tokens so far."""
    prompts = rng.integers(0, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS))
    ids = torch.tensor(np.repeat(prompts, GROUP_SIZE, axis=0))
    temperatures = torch.full((len(ids),), TEMPERATURE, dtype=torch.float64)
    columns = []
    with stock_attention(model, "eager"):
        for _ in range(RESPONSE_TOKENS):
            logits_NV = model(input_ids=ids, use_cache=False).logits[:, -1]
            tokens_N, logprobs_N = sample_tokens(logits_NV, temperatures, torch.tensor(rng.random(len(ids))))
            ids = torch.cat([ids, tokens_N[:, None]], dim=1)
            columns.append(logprobs_N)
    logprobs = torch.stack(columns, dim=1).numpy()
    responses = [
        Response(row[PROMPT_TOKENS:], rollout_logprobs=logprob)
        for row, logprob in zip(ids.numpy(), logprobs, strict=True)
    ]
    return [
        RolloutGroup(Prompt(index, prompt), tuple(responses[index * GROUP_SIZE : (index + 1) * GROUP_SIZE]))
        for index, prompt in enumerate(prompts)
    ]


def scored(group: RolloutGroup, reward: Reward) -> RolloutGroup:
    rewards = [reward(group.prompt.token_ids, response.token_ids) for response in group.responses]
    return replace(group, rewards_N=np.array(rewards))


def reward_curve(
    reward: Reward,
    num_steps: int,
    *,
    learning_rate: float = 0.003,
    share: bool = True,
    max_rows: int = 10_000,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[float]:
    """Mean reward of each step's draws."""
    rng = np.random.default_rng(0)
    algorithm = AlgorithmConfig(**settings)
    model = build_tiny(dtype)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    trainer = Trainer(
        model,
        optimizer,
        algorithm=algorithm,
        temperature=TEMPERATURE,
        max_grad_norm=1.0,
        data_parallel=single_process(),
    )
    curve: list[float] = []
    for _ in range(num_steps):
        groups = attach_advantages([scored(group, reward) for group in draw_groups(model, rng)], algorithm)
        curve.append(float(np.mean([group.rewards_N for group in groups if group.rewards_N is not None])))
        updates = plan_updates(
            groups,
            num_updates=algorithm.num_minibatches,
            num_ranks=1,
            max_rows_per_microbatch=max_rows,
            cost=CostModel(),
            share_prompts=share,
        )
        result = trainer.step(updates, learning_rate=learning_rate)
        assert result.mismatch_max_abs is not None
        assert result.mismatch_max_abs < 1e-4, "the trainer scores what was drawn"
    return curve


def one_token(prompt: np.ndarray, response: np.ndarray) -> float:
    """The share of token 7."""
    return float(np.mean(response == 7))


def last_of_prompt(prompt: np.ndarray, response: np.ndarray) -> float:
    """The share of the prompt's last token: it has to be read."""
    return float(np.mean(response == prompt[-1]))


@pytest.mark.parametrize(("name", "num_minibatches"), sampled(("dapo", 2), ("grpo", 1), ("grpo", 2)))
def test_one_token_is_learnt(name: str, num_minibatches: int):
    curve = reward_curve(one_token, 40, name=name, num_minibatches=num_minibatches)
    assert curve[0] < 0.2
    assert np.mean(curve[-5:]) > 0.95


@pytest.mark.full
def test_the_prompt_is_read():
    curve = reward_curve(last_of_prompt, 400)
    assert np.mean(curve[:10]) < 0.2
    assert np.mean(curve[-20:]) > 0.85


def test_the_curve_does_not_depend_on_the_layout():
    """Draws follow the weights, so that one differing update would show in every later reward."""
    settings: dict[str, Any] = {"name": "dapo", "num_minibatches": 2, "dtype": torch.float64}
    with kept_in_float64():
        shared = reward_curve(one_token, 10, **settings)
        repeated = reward_curve(one_token, 10, **settings, share=False, max_rows=50)
    assert shared == repeated
    assert shared[-1] > 2 * shared[0]


def test_an_entropy_bonus_keeps_the_policy_open():
    closed = reward_curve(one_token, 30)
    open_curve = reward_curve(one_token, 30, entropy_coefficient=0.3)
    assert np.mean(open_curve[-5:]) < 0.75 < np.mean(closed[-5:])
    assert np.mean(open_curve[-5:]) > 2 * open_curve[0], "and still lets it learn"
