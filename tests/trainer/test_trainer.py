"""What a step reports, what it holds on to, and what it refuses."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model
from tests.parity.step_oracle import ragged_groups, run_by_hand, run_trainer
from torch import Tensor

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import single_process
from ratoon.loop.stages import plan_updates
from ratoon.models import attach, forward_logprobs
from ratoon.planner import CostModel, plan_step
from ratoon.trainer import MasterOptimizer, StepResult, Trainer, Update
from ratoon.trainer import trainer as trainer_module
from ratoon.types import Prompt, Response, RolloutGroup

torch.set_num_threads(1)


def plan(
    groups: Sequence[RolloutGroup], num_updates: int = 1, *, share: bool = True, max_rows: int = 1_000
) -> tuple[Update, ...]:
    return plan_updates(
        groups,
        num_updates=num_updates,
        num_ranks=1,
        max_rows_per_microbatch=max_rows,
        cost=CostModel(),
        share_prompts=share,
    )


def make_trainer(dtype: torch.dtype = torch.float32, **algorithm: Any) -> Trainer:
    model = attach(build_model("llama", dtype=dtype))
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.1, betas=(0.9, 0.95))
    return Trainer(
        model,
        optimizer,
        algorithm=AlgorithmConfig(**algorithm),
        temperature=1.0,
        max_grad_norm=1.0,
        data_parallel=single_process(),
    )


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_gradients_that_somebody_left_do_not_count():
    def step(leave: bool) -> list[Tensor]:
        trainer = make_trainer()
        if leave:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.ones_like(parameter)
        trainer.step(plan(ragged_groups(), 1, share=True, max_rows=1_000), learning_rate=0.01)
        return weights(trainer)

    for clean, left in zip(step(False), step(True), strict=True):
        assert torch.equal(clean, left)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_rows", [20, 1_000])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_reported_numbers_are_those_counted_by_hand(share: bool, max_rows: int, num_minibatches: int):
    algorithm = AlgorithmConfig(name="dapo", clip_low=0.03, clip_high=0.05, num_minibatches=num_minibatches)
    groups = ragged_groups()
    updates = plan(groups, num_minibatches, share=share, max_rows=max_rows)
    by_hand = run_by_hand([groups[first::num_minibatches] for first in range(num_minibatches)], algorithm)
    _, result = run_trainer(updates, algorithm)

    for name in ("loss", "grad_norm", "entropy_mean", "ratio_mean", "kl_old_mean", "clipped_fraction"):
        assert getattr(result, name) == pytest.approx(getattr(by_hand, name), rel=1e-9, abs=1e-14), name
    assert result.mismatch_mean_abs == pytest.approx(by_hand.mismatch_mean_abs, rel=1e-9)
    assert result.mismatch_max_abs == pytest.approx(by_hand.mismatch_max_abs, rel=1e-9)
    assert (result.clipped_fraction > 0) == (num_minibatches == 2)
    assert (result.learning_rate, result.num_updates) == (0.01, num_minibatches)
    assert result.num_microbatches == sum(len(update.plan.assignment[0]) for update in updates)
    assert result.num_loss_tokens == 5 + 1 + 4 + 7 + 3 + 2 + 6
    assert result.update_s > 0


def test_dedup_ratio_is_measured_on_what_ran():
    """A prompt whose responses part into microbatches is computed in each of them. TRL#3549, TRL#7328 ask for prompts
    computed once."""
    rng = np.random.default_rng(0)
    responses = tuple(Response(rng.integers(3, VOCAB_SIZE, 4)) for _ in range(4))
    group = RolloutGroup(Prompt("p", rng.integers(3, VOCAB_SIZE, 20)), responses, advantages_N=np.arange(4) / 1.0)
    algorithm = AlgorithmConfig()
    rows = {"whole": 20 + 16, "halves": 2 * (20 + 8), "repeated": 4 * 24}
    for case, settings in {
        "whole": {},
        "halves": {"max_rows": 30},
        "repeated": {"share": False},
    }.items():
        updates = plan([group], **settings)
        _, result = run_trainer(updates, algorithm)
        assert (result.num_rows, result.num_logical_tokens) == (rows[case], 4 * 24), case
        assert result.dedup_ratio == pytest.approx(96 / rows[case]) == updates[0].plan.dedup_ratio


def test_old_logprobs_are_not_computed_where_they_are_the_policys_own(monkeypatch: pytest.MonkeyPatch):
    """unsloth#6871, zoo#868, zoo#1019: a pass was made in every step, and thrown away."""
    passes = []
    monkeypatch.setattr(
        trainer_module,
        "forward_logprobs",
        lambda *given, **named: (passes.append(torch.is_grad_enabled()), forward_logprobs(*given, **named))[1],
    )
    make_trainer().step(plan(ragged_groups()), learning_rate=1e-3)
    assert passes == [True]
    passes.clear()
    make_trainer().step(plan(ragged_groups(), 2), learning_rate=1e-3)
    assert passes == [False, False, True, True], "all old ones before the first update"


def test_rollout_logprobs_may_be_missing():
    groups = [
        replace(group, responses=tuple(replace(response, rollout_logprobs=None) for response in group.responses))
        for group in ragged_groups()
    ]
    result = make_trainer().step(plan(groups), learning_rate=1e-3)
    assert result.mismatch_mean_abs is None and result.mismatch_max_abs is None


def as_the_policy_draws(trainer: Trainer) -> list[RolloutGroup]:
    """The ragged groups with the log-probs that the trainer itself gives them."""
    drawn = []
    for group in ragged_groups():
        layout = plan([group])
        ((batch,),) = trainer._stretches(layout[0], "token")
        logprobs_M, _ = forward_logprobs(trainer.model, batch.layout)
        parts = np.split(logprobs_M.detach().numpy(), np.cumsum(group.response_lengths)[:-1])
        responses = [
            replace(response, rollout_logprobs=part) for response, part in zip(group.responses, parts, strict=True)
        ]
        drawn.append(replace(group, responses=tuple(responses)))
    return drawn


def test_a_policy_that_drew_the_responses_shows_no_mismatch():
    trainer = make_trainer(torch.float64)
    drawn = as_the_policy_draws(trainer)
    result = trainer.step(plan(drawn), learning_rate=1e-3)
    assert result.mismatch_max_abs is not None
    assert result.mismatch_max_abs < 1e-5, "float32's rounding of what was recorded"


def update_of(groups: Sequence[RolloutGroup]) -> Update:
    return Update(groups=tuple(groups), plan=plan_step(groups))


def without_tokens() -> list[RolloutGroup]:
    return [
        RolloutGroup(Prompt("p", np.array([3, 4])), (Response(np.array([], np.int64)),) * 2, advantages_N=np.ones(2))
    ]


@pytest.mark.parametrize("groups", [[], without_tokens()], ids=["no groups", "empty responses"])
def test_a_step_without_loss_tokens_changes_nothing(groups: list[RolloutGroup]):
    """TRL#5826, TRL#5662: a batch in which nothing was left to train on became NaN."""
    trainer = make_trainer()
    before = weights(trainer)
    result = trainer.step([update_of(groups)], learning_rate=0.1)
    assert (result.loss, result.grad_norm, result.num_loss_tokens, result.num_rows) == (0, 0, 0, 0)
    assert (result.entropy_mean, result.dedup_ratio, result.mismatch_mean_abs) == (0, 1, None)
    assert all(torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))
    assert trainer.supervised_step(update_of(groups), learning_rate=0.1) == 0


def test_equal_rewards_leave_no_gradient_of_the_policy():
    trainer = make_trainer()
    groups = [replace(group, advantages_N=np.zeros(group.group_size)) for group in ragged_groups()]
    result = trainer.step(plan(groups), learning_rate=0.1)
    assert (result.loss, result.grad_norm) == (0, 0) and result.num_loss_tokens > 0


def test_groups_without_advantages_are_refused():
    with pytest.raises(AssertionError, match="advantages"):
        make_trainer().step(plan([replace(ragged_groups()[0], advantages_N=None)]), learning_rate=0.1)


def test_a_broken_update_is_refused_and_the_one_before_it_stays():
    """Of two updates the second has an infinite advantage's worth of gradient."""
    groups = list(ragged_groups()[:2])
    good = make_trainer()
    good.step(plan(groups[:1]), learning_rate=1e-3)
    trainer = make_trainer()
    huge = replace(groups[1], advantages_N=np.full(groups[1].group_size, 1e38))
    with pytest.raises(FloatingPointError):
        trainer.step(plan([groups[0], huge], 2), learning_rate=1e-3)
    for now, expected in zip(weights(trainer), weights(good), strict=True):
        assert torch.isfinite(now).all()
        torch.testing.assert_close(now, expected)
    assert math.isfinite(trainer.step(plan(groups), learning_rate=1e-3).loss), "and training can go on"


@pytest.mark.parametrize("num_updates", [1, 2])
def test_outputs_of_a_microbatch_are_gone_before_the_next(num_updates: int, monkeypatch: pytest.MonkeyPatch):
    """verl#6984: outputs of all microbatches were held until the step's end."""
    trainer = make_trainer()
    watched: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []

    def watch(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            num_alive.append(sum(reference() is not None for reference in watched))
        outputs = forward_logprobs(*given, **named)
        if torch.is_grad_enabled():
            watched.extend(weakref.ref(output) for output in outputs)
        return outputs

    def watch_hidden(module: Any, given: Any, output: Any) -> None:
        watched.append(weakref.ref(output[0]))

    monkeypatch.setattr(trainer_module, "forward_logprobs", watch)
    trainer.model.base_model.register_forward_hook(watch_hidden)
    trainer.step(plan(ragged_groups(), num_updates, max_rows=20), learning_rate=1e-3)
    assert len(num_alive) >= 3 and len(watched) >= 3 * len(num_alive)
    assert num_alive == [0] * len(num_alive)


def test_a_16_bit_policy_reports_like_a_wide_one_and_moves():
    wide, narrow = make_trainer(torch.float32), make_trainer(torch.bfloat16)
    before = [master.detach().clone() for master in narrow.optimizer.masters]
    updates = plan(ragged_groups(), max_rows=20)
    exact, rough = wide.step(updates, learning_rate=1e-6), narrow.step(updates, learning_rate=1e-6)
    assert rough.loss == pytest.approx(exact.loss, rel=1e-5), "at the first update the ratio is 1, whatever the width"
    assert rough.entropy_mean == pytest.approx(exact.entropy_mean, rel=0.05)
    assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
    moved = [bool((now != then).any()) for now, then in zip(narrow.optimizer.masters, before, strict=True)]
    assert all(moved)


def test_supervised_step_is_cross_entropy_over_response_tokens():
    trainer = make_trainer(torch.float64)
    groups = [replace(group, advantages_N=None) for group in ragged_groups()]
    reference = build_model("llama")
    reference.set_attn_implementation("eager")
    nats: list[float] = []
    for group in groups:
        for response in group.responses:
            ids = torch.tensor(np.concatenate([group.prompt.token_ids, response.token_ids]))
            scores = reference(input_ids=ids[None]).logits[0].log_softmax(-1)
            first = group.prompt.num_tokens
            nats += [-float(scores[row - 1, ids[row]].detach()) for row in range(first, len(ids))]
    losses = [
        trainer.supervised_step(plan(groups, max_rows=max_rows)[0], learning_rate=0.0) for max_rows in (20, 1_000)
    ]
    assert losses == pytest.approx([float(np.mean(nats))] * 2, rel=1e-6)
    learnt = [trainer.supervised_step(plan(groups)[0], learning_rate=1e-2) for _ in range(15)]
    assert learnt[-1] < 0.5 * learnt[0]


def test_learning_rate_is_the_callers():
    trainer = make_trainer()
    before = weights(trainer)
    assert trainer.step(plan(ragged_groups()), learning_rate=0.0).learning_rate == 0
    assert all(torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))
    result = trainer.step(plan(ragged_groups()), learning_rate=1e-3)
    assert isinstance(result, StepResult) and result.learning_rate == 1e-3
    largest = max(float((now - then).abs().max()) for now, then in zip(weights(trainer), before, strict=True))
    assert 5e-4 < largest < 3e-3, "AdamW moves about one learning rate a step"


def test_a_correction_without_the_engines_logprobs_is_refused_before_any_work():
    groups = list(ragged_groups())
    silent = replace(groups[1].responses[0], rollout_logprobs=None)
    groups[1] = replace(groups[1], responses=(silent, *groups[1].responses[1:]))
    trainer = make_trainer(mismatch_correction="token-tis")
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"mismatch_correction = 'token-tis' .* but 1 of 9 responses came without"):
        trainer.step(plan(groups), learning_rate=0.1)
    assert all(torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))


def test_a_response_without_tokens_needs_no_logprobs_to_be_corrected():
    groups = [
        replace(
            group,
            responses=tuple(
                response if response.num_tokens else replace(response, rollout_logprobs=None)
                for response in group.responses
            ),
        )
        for group in ragged_groups()
    ]
    result = make_trainer(mismatch_correction="icepop").step(plan(groups), learning_rate=1e-3)
    assert result.corrected_fraction is not None and 0 < result.corrected_fraction <= 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dr-grpo"},
        {"name": "gspo"},
        {"name": "cispo"},
        {"mismatch_correction": "sequence-tis"},
        {"mismatch_correction": "icepop"},
    ],
)
@pytest.mark.parametrize("groups", [[], without_tokens()], ids=["no groups", "empty responses"])
def test_every_algorithm_survives_a_step_of_nothing(algorithm: dict[str, Any], groups: list[RolloutGroup]):
    trainer = make_trainer(**algorithm)
    trainer.max_response_tokens = 8
    before = weights(trainer)
    result = trainer.step([update_of(groups)], learning_rate=0.1)
    assert (result.loss, result.grad_norm, result.corrected_fraction, result.kl_ref_mean) == (0, 0, None, None)
    assert (result.mismatch_ratio_mean, result.mismatch_ratio_max, result.mismatch_kl_mean) == (None, None, None)
    assert all(torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))


def test_drift_is_reported_as_it_is_however_hard_it_is_corrected():
    """TRL#5231: the real drift must not hide behind the truncation."""
    updates = plan(ragged_groups())
    free = make_trainer().step(updates, learning_rate=1e-3)
    corrected = make_trainer(mismatch_correction="masked-is", mismatch_max_ratio=1.0).step(updates, learning_rate=1e-3)
    for name in ("mean_abs", "max_abs", "ratio_mean", "ratio_max", "kl_mean"):
        assert getattr(corrected, f"mismatch_{name}") == getattr(free, f"mismatch_{name}"), name
    assert free.corrected_fraction is None and free.correction_mean is None
    assert corrected.corrected_fraction is not None and corrected.corrected_fraction > 0
    assert corrected.correction_mean is not None and corrected.correction_mean < 1


def test_an_engine_that_agrees_is_not_corrected():
    """With exact log-probs every factor is 1, up to the float32 that they were recorded in."""
    trainer = make_trainer(torch.float64, mismatch_correction="sequence-masked-is")
    free = make_trainer(torch.float64)
    drawn = as_the_policy_draws(trainer)
    result = trainer.step(plan(drawn), learning_rate=1e-3)
    assert result.corrected_fraction == 0
    assert result.correction_mean == pytest.approx(1.0, abs=1e-5)
    assert result.loss == pytest.approx(free.step(plan(drawn), learning_rate=1e-3).loss, rel=1e-5)
