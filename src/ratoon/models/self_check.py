"""A small forest against one forward pass per sequence, before a model is trusted with packed layouts."""

# Shape letters: T rows, M scored tokens, V vocabulary.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.layout import pack_groups
from ratoon.models.forest import AttentionCall, Forest
from ratoon.models.forward import score_forest
from ratoon.models.interface import attachment_of, stock_attention
from ratoon.models.shape import layer_windows, model_shape
from ratoon.models.soundness import SpoiltModelError, describe_spoilt, spoilt_weights
from ratoon.types import Prompt, Response, RolloutGroup, UserError

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed log-prob difference over half the range of the logits. Transformers computes norms and rotary
in float32 whatever the dtype, so float64 cannot be held to its own precision."""


@torch.no_grad()
def check_against_stock(model: PreTrainedModel) -> tuple[AttentionCall, ...]:
    """Raises UserError unless an attached model scores a small forest as its own eager attention scores each sequence.

    Also changes one response's tokens and asks that no other response notices, which finds a leak that
    low precision would hide. Returns what each layer asked of its attention.
    """
    name = type(model).__name__
    vocab_size = model_shape(model.config).vocab_size
    groups = _groups(vocab_size, last_seed=0)
    with evaluation(model):
        calls: list[AttentionCall] = []
        logprobs_M = _score(model, groups, calls)
        _check_calls(model, calls)
        with stock_attention(model, "eager"):
            expected_M, half_range = _score_each(model, groups)
        changed_M = _score(model, _groups(vocab_size, last_seed=1))

    tolerance = TOLERANCES[model.dtype] * half_range
    error = float((logprobs_M - expected_M).abs().max())
    if not error <= tolerance:
        _refuse_spoilt(model, expected_M)
        is_number = bool(logprobs_M.isfinite().all())
        found = f"differ by {error:.2e} nats, allowed {tolerance:.2e}" if is_number else "are not finite"
        raise UserError(
            f"{name} failed the check at attach time: beside one forward pass per sequence, its log-probs on a small "
            f"forest {found} in {model.dtype}; its attention or head does something that packed layouts do not carry, "
            "so it cannot be trained on them"
        )
    num_last = groups[-1].responses[-1].num_tokens
    leak = float((logprobs_M - changed_M)[:-num_last].abs().max())
    # Experts see other batches when routing changes, which moves rounding; dense models have no such excuse.
    allowed = tolerance if model_shape(model.config).num_experts else 0.0
    if not leak <= allowed:
        raise UserError(
            f"{name} failed the check at attach time: changing one response moved another's log-probs by "
            f"{leak:.2e} nats, allowed {allowed:.2e}; its rows read rows they must not"
        )
    return tuple(calls)


def _refuse_spoilt(model: PreTrainedModel, stock_logprobs_M: Tensor) -> None:
    """Raises SpoiltModelError where the model's numbers are no numbers in any layout."""
    name = type(model).__name__
    spoilt = spoilt_weights(model.named_parameters())
    if spoilt:
        raise SpoiltModelError(f"{name} has {describe_spoilt(spoilt)}; take weights from before they were spoilt")
    if not stock_logprobs_M.isfinite().all():
        raise SpoiltModelError(
            f"{name} has finite weights, and log-probs that are not, in transformers' own forward pass too: it "
            f'overflows in {model.dtype}; take model.dtype = "float32" (or "bfloat16") where that is 16 bits, or '
            "weights from before they were spoilt"
        )


def checked_sequences(model: PreTrainedModel) -> list[NDArray[np.int64]]:
    """Token ids of what `check_against_stock` scores: prompt and response of each sequence."""
    groups = _groups(model_shape(model.config).vocab_size, last_seed=0)
    return [
        np.concatenate([group.prompt.token_ids, response.token_ids]) for group in groups for response in group.responses
    ]


def _groups(vocab_size: int, last_seed: int) -> list[RolloutGroup]:
    """Two prompts, four responses; only the last response's tokens follow `last_seed`."""
    rng, last_rng = np.random.default_rng(7), np.random.default_rng(last_seed)

    def draw(length: int, source: np.random.Generator = rng) -> NDArray[np.int64]:
        return source.integers(0, vocab_size, length)

    return [
        RolloutGroup(Prompt("a", draw(2)), (Response(draw(3)),)),
        RolloutGroup(Prompt("b", draw(6)), (Response(draw(4)), Response(draw(2)), Response(draw(5, last_rng)))),
    ]


def _score(
    model: PreTrainedModel,
    groups: list[RolloutGroup],
    calls: list[AttentionCall] | None = None,
) -> Tensor:
    forest = Forest.build(pack_groups(groups), device=model.device, impl=attachment_of(model).impl)
    try:
        return score_forest(model, replace(forest, calls=calls))[0].double()
    except TypeError as error:
        raise UserError(
            f"{type(model).__name__} does not pass the forest on to its attention ({error}); it cannot share prompts"
        ) from error
    except ValueError as error:
        raise UserError(f"{type(model).__name__} cannot be trained on shared prompts: {error}") from error


def _score_each(model: PreTrainedModel, groups: list[RolloutGroup]) -> tuple[Tensor, float]:
    """[M] log-probs by the model's whole forward pass, a sequence at a time, and half the range of its logits."""
    logprobs: list[Tensor] = []
    half_range = 0.0
    for group in groups:
        prompt = group.prompt.token_ids
        for response in group.responses:
            sequence = torch.tensor(np.concatenate([prompt, response.token_ids]), device=model.device)
            logits_MV = model(input_ids=sequence[None], use_cache=False).logits[0, prompt.size - 1 : -1].double()
            target_M1 = sequence[prompt.size :, None]
            logprobs.append(logits_MV.log_softmax(dim=-1).gather(1, target_M1)[:, 0])
            half_range = max(half_range, float(logits_MV.max() - logits_MV.min()) / 2)
    return torch.cat(logprobs), half_range


def _check_calls(model: PreTrainedModel, calls: list[AttentionCall]) -> None:
    """Every layer attended through us, with the window its configuration gives it."""
    num_layers = model_shape(model.config).num_layers
    if len(calls) != num_layers:
        raise UserError(
            f"{type(model).__name__} called its attention {len(calls)} times for {num_layers} layers; "
            "a layer that mixes tokens in another way cannot share prompts"
        )
    windows = layer_windows(model.config) or (None,) * num_layers
    given = tuple(call.window for call in calls)
    if given != windows:
        raise UserError(
            f"{type(model).__name__} hands its layers the windows {given}, its configuration says {windows}; "
            "a forest longer than the window would be read wrongly"
        )


@contextmanager
def evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside; on the way out every module's own training flag."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
