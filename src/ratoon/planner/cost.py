"""Seconds that a piece of a group takes, as a sum over its rows, attended pairs and scored tokens."""

# Shape letters: P prompt tokens, R response tokens.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratoon.planner.flops import layers_by_window, pair_flops, pairs_of_prefix, row_flops, scored_token_flops
from ratoon.types.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class WindowCost:
    """Attention cost of all layers that have one window."""

    window: int | None
    """Tokens that a query sees, itself included; None for global attention."""

    seconds_per_pair: float
    """Seconds for one query-key pair, over all these layers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicted seconds of forward and backward. Linear, so costs of parts add up.

    The defaults are a dense 1.7B decoder (28 layers, 16 heads of 128, vocabulary 151,936) at
    4e14 FLOP/s. Plans depend on the proportions only; seconds are right for one model and device.
    """

    seconds_per_row: float = 2.1e-5
    """Dense layers, for one stored token."""

    seconds_per_scored_token: float = 4.7e-6
    """Output head and log-prob, for one response token."""

    attention: tuple[WindowCost, ...] = (WindowCost(None, 2.0e-9),)
    """One entry for each distinct window of the model."""

    seconds_per_microbatch: float = 5e-3
    """Fixed cost of one forward and backward pass, whatever is in it; an idle rank pays it too. So does a prompt that
    is kept for several microbatches."""

    def __post_init__(self) -> None:
        costs = (self.seconds_per_row, self.seconds_per_scored_token, self.seconds_per_microbatch)
        for seconds in (*costs, *(entry.seconds_per_pair for entry in self.attention)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"costs must be finite and not negative, got {self}")

    @classmethod
    def from_shape(cls, shape: ModelShape, *, flops_per_s: float, seconds_per_microbatch: float = 5e-3) -> "CostModel":
        """From a model's sizes and the FLOP/s one rank reaches (not its peak)."""
        if not (math.isfinite(flops_per_s) and flops_per_s > 0):
            raise ValueError(f"flops_per_s must be finite and positive, got {flops_per_s}")
        return cls(
            seconds_per_row=row_flops(shape) / flops_per_s,
            seconds_per_scored_token=scored_token_flops(shape) / flops_per_s,
            attention=tuple(
                WindowCost(window, num_layers * pair_flops(shape) / flops_per_s)
                for window, num_layers in layers_by_window(shape).items()
            ),
            seconds_per_microbatch=seconds_per_microbatch,
        )

    def prompt_s(self, num_prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of prompts computed once, elementwise."""
        P = np.asarray(num_prompt_tokens, np.int64)
        seconds = np.asarray(self.seconds_per_row * P, np.float64)
        for entry in self.attention:
            seconds = seconds + entry.seconds_per_pair * pairs_of_prefix(P, entry.window)
        return seconds

    def response_s(self, num_prompt_tokens: ArrayLike, num_response_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds that responses add to their prompts', elementwise."""
        P, R = np.asarray(num_prompt_tokens, np.int64), np.asarray(num_response_tokens, np.int64)
        seconds = np.asarray((self.seconds_per_row + self.seconds_per_scored_token) * R, np.float64)
        for entry in self.attention:
            pairs = pairs_of_prefix(P + R, entry.window) - pairs_of_prefix(P, entry.window)
            seconds = seconds + entry.seconds_per_pair * pairs
        return seconds

    def saved_by_keeping_s(self, prompt_s: float, num_parts: int) -> float:
        """Seconds that parts of one group save where their prompt is computed once, in a pass of its own, and not in
        each of them. Negative where that pass costs more."""
        return prompt_s * (num_parts - 1) - self.seconds_per_microbatch

    def part_s(self, num_prompt_tokens: int, response_lengths: Sequence[int]) -> float:
        """Seconds of one prompt with these responses, without the cost of the microbatch around them."""
        lengths = np.asarray(response_lengths, np.int64)
        return float(self.prompt_s(num_prompt_tokens)) + float(self.response_s(num_prompt_tokens, lengths).sum())
