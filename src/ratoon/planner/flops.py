"""Floating-point work of a training step, counted once for each row, scored token and attended pair."""

# Shape letters: T rows, M scored tokens, H heads, D head dim, C channels, V vocabulary, L layers.
# P prompt tokens, R response tokens.

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratoon.layout.packed_layout import PackedLayout
from ratoon.types.model_shape import ModelShape

# Backward of a matrix multiplication is two of them; backward of attention is five for its forward's
# two, because it multiplies queries by keys again.
_MATMUL_PASSES = 3.0
_FROZEN_MATMUL_PASSES = 2.0
_ATTENTION_PASSES = 3.5

# Dense bf16 TFLOP/s by the vendors' datasheets, by a part of the device's name.
_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "4090": 165.0}


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU, for MFU; None where it is not known."""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in device_name), None)


def row_flops(shape: ModelShape) -> float:
    """Forward and backward of one row through the weights of all layers (those a token meets)."""
    return _MATMUL_PASSES * 2.0 * shape.active_parameters


def scored_token_flops(shape: ModelShape) -> float:
    """Forward and backward of one scored token through the output head."""
    return _MATMUL_PASSES * 2.0 * shape.hidden_size * shape.vocab_size


def pair_flops(shape: ModelShape) -> float:
    """Forward and backward of one query-key pair in one layer, all heads."""
    return _ATTENTION_PASSES * 4.0 * shape.num_heads * shape.head_dim


def layers_by_window(shape: ModelShape) -> dict[int | None, int]:
    """How many layers have each sliding window; None is global attention."""
    windows = shape.windows or (None,) * shape.num_layers
    if len(windows) != shape.num_layers:
        raise ValueError(f"windows must hold one entry for each of {shape.num_layers} layers, got {len(windows)}")
    return dict(Counter(windows))


def pairs_of_prefix(length: ArrayLike, window: int | None) -> NDArray[np.int64]:
    """Query-key pairs among the first `length` tokens of a sequence (elementwise), themselves included."""
    n = np.asarray(length, np.int64)
    if window is None:
        return n * (n + 1) // 2
    ramp = np.minimum(n, window)  # the first `window` tokens see all before them, later ones `window` keys
    return ramp * (ramp + 1) // 2 + (n - ramp) * window


def attended_pairs(positions_T: NDArray[np.integer[Any]], window: int | None = None) -> int:
    """Query-key pairs of one layer over all rows of a layout, each pair once.

    positions_T: [T] logical positions; a row at position p attends the p + 1 tokens of its own
    path, wherever they are stored, or the last `window` of them.
    """
    keys_T = positions_T.astype(np.int64) + 1
    return int((keys_T if window is None else np.minimum(keys_T, window)).sum())


def useful_flops(shape: ModelShape, layout: PackedLayout, *, trains_weights: bool = True) -> float:
    """Useful work of forward and backward on a layout; recomputation is not useful work.

    6 · active non-embedding parameters · T + 6 · C · V · M + 3.5 · 4 · H · D · pairs, pairs summed
    over layers and counted inside windows. Divided by seconds and the device's peak it is `useful_mfu`.

    trains_weights: False for frozen weights beneath adapters, whose own gradients are not computed: 4 in place of
        each 6. The adapters' work, a few percent, is left out.
    """
    pairs = sum(
        num_layers * attended_pairs(layout.positions_T, window)
        for window, num_layers in layers_by_window(shape).items()
    )
    matmuls = row_flops(shape) * layout.num_rows + scored_token_flops(shape) * layout.num_scored
    if not trains_weights:
        matmuls *= _FROZEN_MATMUL_PASSES / _MATMUL_PASSES
    return matmuls + pair_flops(shape) * pairs
