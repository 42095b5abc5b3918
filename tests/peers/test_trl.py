"""TRL's GRPO and RLOO losses and ours on the same batch: value and gradient, in fp32.

Ours runs on the shared layout, TRL's on padded copies. These tests run in an environment of their own, where TRL is
(`make test-trl`); its private `_compute_loss` is called with the batch that its trainer would have made.
"""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.tiny_policy import tiny_model, tiny_tokenizer
from torch import Tensor

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import single_process
from ratoon.loop.stages import plan_updates
from ratoon.models import attach
from ratoon.planner import CostModel
from ratoon.trainer import MasterOptimizer, Trainer
from ratoon.trainer.microbatch import build_microbatch
from ratoon.trainer.step_result import StepTotals
from ratoon.types import Prompt, Response, RolloutGroup

pytestmark = pytest.mark.trl

MAX_RESPONSE_TOKENS = 9
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Batch:
    """Two prompts with ragged responses, and random log-probs of everything that is not the policy."""

    groups: tuple[RolloutGroup, ...]
    old: list[np.ndarray]
    ref: list[np.ndarray]


def make_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(2, 12, count)

    groups, old, ref = [], [], []
    for index, (P, lengths) in enumerate(((5, (3, MAX_RESPONSE_TOKENS, 1)), (2, (4, 7, 6)))):
        responses = []
        for R in lengths:
            base = -2.4 + 0.5 * rng.standard_normal(R)
            old.append(base.astype(np.float32))
            ref.append((base + 0.3 * rng.standard_normal(R)).astype(np.float32))
            rollout = np.minimum(base + 0.4 * rng.standard_normal(R), 0).astype(np.float32)
            responses.append(Response(tokens(R), rollout_logprobs=rollout))
        groups.append(RolloutGroup(Prompt(index, tokens(P)), tuple(responses), rewards_N=rng.standard_normal(3)))
    return Batch(tuple(groups), old, ref)


def ours(batch: Batch, config: AlgorithmConfig, advantages: Sequence[np.ndarray]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by parameter name, on the shared layout in one microbatch."""
    model = attach(tiny_model(), "reference")
    groups = [
        replace(group, advantages_N=advantages_N) for group, advantages_N in zip(batch.groups, advantages, strict=True)
    ]
    (update,) = plan_updates(groups, num_updates=1, num_ranks=1, max_rows_per_microbatch=1000, cost=CostModel())
    ((parts,),) = update.plan.assignment
    ordered = [index * 3 + response for index, chosen in parts for response in chosen]
    trainer = Trainer(
        model,
        MasterOptimizer(model.parameters(), learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95)),
        algorithm=config,
        temperature=1.0,
        max_grad_norm=1e9,
        data_parallel=single_process(),
        reference=lambda layout, support: torch.from_numpy(np.concatenate([batch.ref[index] for index in ordered])),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    microbatch = build_microbatch(update, parts, loss_mean=config.loss_mean, max_response_tokens=MAX_RESPONSE_TOKENS)
    old_logprobs_M = torch.from_numpy(np.concatenate([batch.old[index] for index in ordered]))
    totals = StepTotals.zeros(torch.device("cpu"))
    trainer.optimizer.clear()
    trainer._backward(replace(microbatch, old_logprobs_M=old_logprobs_M), totals)
    names = [name for name, _ in model.named_parameters()]
    grads = [master.grad for master in trainer.optimizer.masters]
    return totals.loss.item(), {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def padded(rows: Sequence[np.ndarray], *, left: bool, value: float = 0) -> Tensor:
    width = max(row.size for row in rows)
    sides = [(width - row.size, 0) if left else (0, width - row.size) for row in rows]
    return torch.from_numpy(
        np.stack([np.pad(row, side, constant_values=value) for row, side in zip(rows, sides, strict=True)])
    )


def trl_inputs(batch: Batch, advantages: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """One row a response, prompts padded on the left and responses on the right, as TRL's collation does."""
    responses = [response for group in batch.groups for response in group.responses]
    prompts = [group.prompt.token_ids for group in batch.groups for _ in group.responses]
    ids = [response.token_ids for response in responses]
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([np.ones_like(row) for row in prompts], left=True),
        "completion_ids": padded(ids, left=False),
        "completion_mask": padded([np.ones_like(row) for row in ids], left=False),
        "advantages": torch.from_numpy(np.concatenate(advantages)).float(),
        "old_per_token_logps": padded(batch.old, left=False),
        "old_logps": torch.tensor([row.sum() for row in batch.old]),
        "ref_per_token_logps": padded(batch.ref, left=False),
        "num_items_in_batch": torch.tensor(sum(row.size for row in ids)),
    }


def trl_trainer(kind: str, folder: Path, **settings: Any) -> Any:
    """A trainer that was never asked to train, with the same tiny model."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    config_class, trainer_class = (
        (trl.GRPOConfig, trl.GRPOTrainer) if kind == "grpo" else (trl.RLOOConfig, trl.RLOOTrainer)
    )
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.set_attn_implementation("eager")
    tokenizer.padding_side = "left"
    args = config_class(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], num_generations=3,
        per_device_train_batch_size=6, max_completion_length=MAX_RESPONSE_TOKENS, gradient_checkpointing=False,
        **settings,
    )  # fmt: skip
    return trainer_class(
        model=model,
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd"] * 6}),
        processing_class=tokenizer,
    )


def theirs(trainer: Any, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    model.train()
    loss = trainer._compute_loss(model, deepcopy(inputs))
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def group_advantages(batch: Batch, config: AlgorithmConfig) -> tuple[np.ndarray, ...]:
    from ratoon.algorithms import step_advantages

    return step_advantages([group.rewards_N for group in batch.groups if group.rewards_N is not None], config)


def trl_ratio(batch: Batch, mode: str, low: float | None, high: float | None) -> Tensor:
    """TRL's `importance_sampling_ratio`, which it computes inside its generation (grpo_trainer.py, 1.16)."""
    rollout = [response.rollout_logprobs for group in batch.groups for response in group.responses]
    gap = padded([old - made for old, made in zip(batch.old, rollout, strict=True)], left=False)
    if mode.startswith("sequence"):
        gap = gap.sum(-1, keepdim=True)
    ratio = gap.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    outside = (ratio < (low or 0.0)) | (ratio > (high or torch.inf))
    return ratio.masked_fill(outside, 0.0)


CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    # ours, TRL's
    "grpo": ({"name": "grpo"}, {"loss_type": "grpo"}),
    "dr-grpo": ({"name": "dr-grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    # TRL's bound is the ratio itself, ours what it may exceed 1 by.
    "cispo": ({"name": "cispo", "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "dual clip": (
        {"name": "grpo", "dual_clip": 1.3, "num_minibatches": 2},
        {"loss_type": "grpo", "delta": 1.3},
    ),
    # Without TRL's ratio on the KL term (DeepSeek-V3.2), which ours does not have.
    "kl in the loss": (
        {"name": "grpo", "kl_coefficient": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "kl and token mean": (
        {"name": "dapo", "kl_coefficient": 0.3},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "reinforce++": ({"name": "reinforce++"}, {"loss_type": "grpo", "scale_rewards": "batch"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_agree_with_trl(case: str, seed: int, tmp_path: Path):
    our_settings, trl_settings = CASES[case]
    batch, config = make_batch(seed), AlgorithmConfig.model_validate(our_settings)
    advantages = group_advantages(batch, config)
    trainer = trl_trainer("grpo", tmp_path, **{"epsilon": 0.2, **trl_settings, "beta": 0.0})
    trainer.beta = trl_settings.get("beta", 0.0)  # given at once, it would look for a reference model by name
    assert_agree(ours(batch, config, advantages), theirs(trainer, trl_inputs(batch, advantages)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rloo_agrees_with_trl_on_policy(seed: int, tmp_path: Path):
    """TRL averages a response's sum over responses; ours divides by the run's longest response too, a constant."""
    batch, config = make_batch(seed), AlgorithmConfig(name="rloo")
    batch = replace(batch, old=policy_logprobs(batch))
    advantages = group_advantages(batch, config)
    _, grads = ours(batch, config, advantages)
    _, wanted = theirs(trl_trainer("rloo", tmp_path, beta=0.0), trl_inputs(batch, advantages))
    # The values differ (-A for each response, or for each of its tokens); what is learned does not.
    assert_agree((0.0, {name: grad * MAX_RESPONSE_TOKENS for name, grad in grads.items()}), (0.0, wanted))


def policy_logprobs(batch: Batch) -> list[np.ndarray]:
    """Of every response's tokens under the tiny model, one sequence at a time."""
    model, found = tiny_model(), []
    for group in batch.groups:
        for response in group.responses:
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, response.token_ids]))
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].log_softmax(-1)
            P = group.prompt.num_tokens
            found.append(logprobs[P - 1 : -1].gather(1, ids[P:, None]).squeeze(1).numpy())
    return found


CORRECTIONS = {
    "token-tis": ("token_truncate", None, 1.3),
    "sequence-tis": ("sequence_truncate", None, 1.3),
    "masked-is": ("token_mask", None, 1.3),
    "sequence-masked-is": ("sequence_mask", None, 1.3),
    "icepop": ("token_mask", 0.7, 1.3),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_mean", ["sequence", "token"])
@pytest.mark.parametrize("seed", [0, 1])
def test_mismatch_corrections_agree_with_trl(correction: str, loss_mean: str, seed: int, tmp_path: Path):
    mode, low, high = CORRECTIONS[correction]
    settings = {"mismatch_correction": correction, "mismatch_max_ratio": high, "loss_mean": loss_mean}
    if low is not None:
        settings["mismatch_min_ratio"] = low
    batch, config = make_batch(seed), AlgorithmConfig.model_validate(settings)
    advantages = group_advantages(batch, config)
    trainer = trl_trainer("grpo", tmp_path, beta=0.0, loss_type="grpo" if loss_mean == "sequence" else "dapo")
    trainer.use_vllm = True  # only what its loss looks at: the ratios are given
    trainer.vllm_importance_sampling_correction = True
    inputs = trl_inputs(batch, advantages) | {"importance_sampling_ratio": trl_ratio(batch, mode, low, high)}
    uncorrected = ours(batch, AlgorithmConfig.model_validate({"loss_mean": loss_mean}), advantages)
    corrected = ours(batch, config, advantages)
    assert abs(corrected[0] - uncorrected[0]) > 1e-4, "the correction must act on this batch"
    assert_agree(corrected, theirs(trainer, inputs))


def assert_agree(found: tuple[float, Mapping[str, Tensor]], wanted: tuple[float, Mapping[str, Tensor]]) -> None:
    assert abs(found[0] - wanted[0]) < TOLERANCE * max(1.0, abs(wanted[0]))
    assert found[1].keys() == wanted[1].keys()
    largest = max(grad.abs().max().item() for grad in wanted[1].values())
    assert largest > 1e-3, "a batch without gradient shows nothing"
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, largest), msg=name)
