"""A model from a folder: one policy update of one group, shared prompt against padded copies."""

# Shape letters: N responses, P prompt tokens, R response tokens, V vocabulary, C channels.

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.algorithms.losses import clipped_policy_loss
from ratoon.bench.rows import BenchRow
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import forward_logprobs, model_shape, stock_attention
from ratoon.ops import linear_logprob
from ratoon.planner import useful_flops
from ratoon.types import Prompt, Response, RolloutGroup

_LOSS_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = 1e-3
"""Relative, float32: the variants sum the same terms in other orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdateCase:
    """One group of N responses of R tokens to one prompt of P."""

    model: str
    P: int
    R: int
    N: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The same group as a forest and as a padded batch."""

    layout: PackedLayout
    token_ids_NS: Tensor
    advantages_N: Tensor
    case: PolicyUpdateCase

    @property
    def weights_M(self) -> Tensor:
        return torch.full((self.layout.num_scored,), 1.0 / self.layout.num_scored)

    @property
    def advantages_M(self) -> Tensor:
        return self.advantages_N[torch.from_numpy(self.layout.sequence_of_M.astype(np.int64))]


Update = Callable[[PreTrainedModel, _Work], Tensor]


def bench_policy_update(
    model: PreTrainedModel, case: PolicyUpdateCase, *, repeats: int, command: str
) -> list[BenchRow]:
    """Checks every variant's loss and gradient against ours, then times them in turn. Returns a row for each.

    Raises RuntimeError, and times nothing, where a variant computes something else.
    """
    work = _make_work(model, case)
    variants: dict[str, Update] = {
        "auto": _shared,
        "padded-chunked-logprob": _padded_chunked,
        "padded-full-logits": _padded_full,
        "padded-response-logits": _padded_response_logits,
    }
    _check_equal(model, work, variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, update in variants.items():  # in turn, so that a drifting machine drifts for all
            _time_one(model, work, update)  # untimed: it pays for the memory that the variant before gave back
            seconds[name].append(_time_one(model, work, update))
    flops = useful_flops(model_shape(model.config), work.layout)
    ours = statistics.median(seconds["auto"])
    rows: list[BenchRow] = []
    for name, samples in seconds.items():
        step_s = statistics.median(samples)
        rows.append(
            BenchRow(
                bench="policy-update",
                case={"model": case.model, "P": case.P, "R": case.R, "N": case.N, "groups": 1},
                impl=name,
                layout="shared" if name == "auto" else "replicated",
                peer=name != "auto",
                figures={
                    "recompute": "none",
                    "compile": False,
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "step_s": step_s,
                    "step_min_s": min(samples),
                    "step_max_s": max(samples),
                    "repeats": repeats,
                    "times_ours": step_s / ours,
                    "flop_ratio": _replicated_flops(model, case) / flops,
                    "useful_gflops_per_s": flops / step_s / 1e9,
                    "dedup_ratio": work.layout.dedup_ratio,
                },
                command=command,
            )
        )
    return rows


def _make_work(model: PreTrainedModel, case: PolicyUpdateCase) -> _Work:
    rng = np.random.default_rng(0)
    vocab_size = model_shape(model.config).vocab_size
    prompt = rng.integers(0, vocab_size, case.P)
    responses = [rng.integers(0, vocab_size, case.R) for _ in range(case.N)]
    group = RolloutGroup(Prompt("bench", prompt), tuple(Response(tokens) for tokens in responses))
    sequences = np.stack([np.concatenate([prompt, tokens]) for tokens in responses])
    return _Work(
        layout=pack_groups([group]),
        token_ids_NS=torch.from_numpy(sequences),
        advantages_N=torch.from_numpy(rng.standard_normal(case.N)).float(),
        case=case,
    )


def _loss(logprobs_M: Tensor, work: _Work) -> Tensor:
    return clipped_policy_loss(
        logprobs_M, logprobs_M.detach(), work.advantages_M, work.weights_M, clip_low=0.2, clip_high=0.2
    ).loss


def _shared(model: PreTrainedModel, work: _Work) -> Tensor:
    """Ours: the prompt once through the whole model."""
    logprobs_M, _ = forward_logprobs(model, work.layout)
    return _loss(logprobs_M, work)


def _padded_chunked(model: PreTrainedModel, work: _Work) -> Tensor:
    """One sequence a response, with our chunked log-prob on the response tokens."""
    P, R, N = work.case.P, work.case.R, work.case.N
    with stock_attention(model, "sdpa"):
        hidden_NSC = model.base_model(input_ids=work.token_ids_NS, use_cache=False)[0]
    head = model.get_output_embeddings()
    assert head is not None, "load_policy accepts only models with a head"
    hidden_MC = hidden_NSC[:, P - 1 : -1].reshape(N * R, -1)
    logprobs_M, _ = linear_logprob(hidden_MC, head.weight, work.token_ids_NS[:, P:].reshape(-1))
    return _loss(logprobs_M, work)


def _padded_full(model: PreTrainedModel, work: _Work) -> Tensor:
    """One sequence a response, logits of every token."""
    P = work.case.P
    with stock_attention(model, "sdpa"):
        logits_NSV = model(input_ids=work.token_ids_NS, use_cache=False).logits
    logprobs_NSV = torch.log_softmax(logits_NSV[:, :-1].float(), dim=-1)
    targets_NS1 = work.token_ids_NS[:, 1:, None]
    return _loss(logprobs_NSV.gather(2, targets_NS1)[:, P - 1 :, 0].reshape(-1), work)


def _padded_response_logits(model: PreTrainedModel, work: _Work) -> Tensor:
    """One sequence a response, logits of the response tokens only (`logits_to_keep`)."""
    P, R = work.case.P, work.case.R
    with stock_attention(model, "sdpa"):
        logits_NRV = model(input_ids=work.token_ids_NS, use_cache=False, logits_to_keep=R + 1).logits[:, :-1]
    logprobs_NRV = torch.log_softmax(logits_NRV.float(), dim=-1)
    return _loss(logprobs_NRV.gather(2, work.token_ids_NS[:, P:, None])[..., 0].reshape(-1), work)


def _check_equal(model: PreTrainedModel, work: _Work, variants: dict[str, Update]) -> None:
    ours: tuple[float, list[Tensor]] | None = None
    for name, update in variants.items():
        model.zero_grad(set_to_none=True)
        # Advantages alone give a loss near 0 at ratio 1; its gradient is what must agree.
        loss = update(model, work)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        if ours is None:
            ours = (loss.item(), gradients)
            continue
        scale = torch.stack([gradient.norm() for gradient in ours[1]]).norm()
        gap = torch.stack([(mine - theirs).norm() for mine, theirs in zip(ours[1], gradients, strict=True)]).norm()
        if abs(loss.item() - ours[0]) > _LOSS_TOLERANCE or gap > _GRADIENT_TOLERANCE * scale:
            raise RuntimeError(
                f"{name} computes another update than ours: loss {loss.item():.6g} against {ours[0]:.6g}, "
                f"relative gradient gap {(gap / scale).item():.3g}; no speed is reported"
            )
    model.zero_grad(set_to_none=True)


def _time_one(model: PreTrainedModel, work: _Work, update: Update) -> float:
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    update(model, work).backward()
    return time.perf_counter() - started


def _replicated_flops(model: PreTrainedModel, case: PolicyUpdateCase) -> float:
    """Useful work of N separate sequences with the same scored tokens."""
    one = Prompt("bench", np.zeros(case.P, np.int64))
    alone = pack_groups([RolloutGroup(one, (Response(np.zeros(case.R, np.int64)),)) for _ in range(case.N)])
    assert alone.num_rows == case.N * (case.P + case.R), "replicated sequences share nothing"
    return useful_flops(model_shape(model.config), alone)
