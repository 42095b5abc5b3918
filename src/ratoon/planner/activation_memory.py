"""Bytes that autograd keeps of a decoder's layers, and that their backward passes need beside.

Of transformers decoders of the Llama kind, byte by byte but for norms' reciprocals and index vectors. Exact for Llama
and Qwen3, with and without adapters (`tests/planner/test_memory.py` asks autograd); Gemma's extra norms and biases are
left out.

Compiled layers keep less: torch.compile computes norms and the MLP's activation function again, from what products
leave, and never writes their float32 copies. That too is what autograd said, of Llama and Qwen3.

Where ranks share a pass (`MicrobatchSize.num_sharers`), attention keeps its output by heads beside the one by rows that
the next product reads, and key and value heads that go to several ranks once for each.
"""

# Shape letters: T rows, M scored tokens, U ranks that share a pass, H query heads, Hkv key and value heads, D head dim,
# C channels, I width of the MLP, K experts per token.

from math import gcd

from ratoon.planner.memory_sizes import MicrobatchSize
from ratoon.types.model_shape import ModelShape

_MLP_GRADIENTS = 3
"""Gradients of the MLP's width that are alive at a time while one layer's backward runs."""

_RESIDUAL_GRADIENTS = 4
"""The same of the residual's width: its own gradient, its sum, and the norm's float32 work."""

_ATTENTION_PARTS = 4
"""Linear layers of attention: queries, keys, values, output."""

_MLP_PARTS = 3
"""Linear layers of a gated MLP."""


def activation_bytes(shape: ModelShape, microbatch: MicrobatchSize, dtype_bytes: int) -> int:
    """What the layers, the last norm and the head keep for backward."""
    T, M, C, b = microbatch.num_rows, microbatch.num_scored, shape.hidden_size, dtype_bytes
    last_norm = C * (max(b, 4) + (0 if microbatch.adapter_rank else b))
    kept = microbatch.num_kept_rows * shape.num_layers * _kept_for_others(shape, microbatch, b)
    return T * (shape.num_layers * _kept_of_layer(shape, microbatch, b) + last_norm) + M * (C * b + 28) + kept


def layer_activation_bytes(shape: ModelShape, microbatch: MicrobatchSize, dtype_bytes: int) -> int:
    """What one layer keeps."""
    return microbatch.num_rows * _kept_of_layer(shape, microbatch, dtype_bytes)


def layer_scratch_bytes(shape: ModelShape, microbatch: MicrobatchSize, dtype_bytes: int, *, on_cuda: bool) -> int:
    """What one layer's backward needs beside what is kept: gradients, and what it computes again.

    The larger of two moments: in the MLP, and in attention, when the MLP's activations are gone already.
    """
    b = dtype_bytes
    mlp = _mlp_bytes(shape, microbatch, b) + _norm_bytes(shape, shape.hidden_size, microbatch, b)
    in_mlp, in_attention = _mlp_gradients(shape, b), _attention_gradients(shape, microbatch, b, on_cuda=on_cuda)
    match microbatch.recompute:
        case "none":
            most = max(in_mlp, in_attention - mlp)
        case "selective":
            most = max(in_mlp + mlp, in_attention)
        case "full":
            again = _whole_layer(shape, microbatch, b)
            most = again + max(in_mlp, in_attention - mlp)
    return microbatch.num_rows * most


def _kept_of_layer(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """What one layer keeps of one row."""
    C = shape.hidden_size
    match microbatch.recompute:
        case "none":
            return _whole_layer(shape, microbatch, b)
        case "selective":
            qk_inputs = _head_widths(shape) * b if microbatch.has_qk_norm else 0
            adapters = _ATTENTION_PARTS * microbatch.adapter_rank * b
            # An exchange between ranks cuts a compiled layer's graph in two.
            is_one_graph = _is_fused(shape, microbatch) and microbatch.num_sharers == 1
            residuals = (3 if is_one_graph else 4) * C * b
            return _attention_bytes(shape, microbatch, b) + residuals + qk_inputs + adapters
        case "full":
            return C * b


def _kept_for_others(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """Of one row and layer of a prompt that stands before the pass, beside what its own pass keeps."""
    keys = 2 * shape.num_kv_heads * shape.head_dim
    gradients = keys * (b + max(b, 4))  # one microbatch's, and the sum
    if microbatch.recompute == "full":
        return keys * b + gradients
    # Keys and values once more, before the pass's own; and places for queries and outputs that nobody asks for.
    again = 2 * shape.num_heads * shape.head_dim * b + 4 * shape.num_heads
    return keys * b + again + gradients


def _whole_layer(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """Of one row, where nothing is computed again."""
    adapters = (_ATTENTION_PARTS + _MLP_PARTS) * microbatch.adapter_rank * b
    kept = _attention_bytes(shape, microbatch, b) + adapters + _mlp_bytes(shape, microbatch, b)
    kept += 2 * _norm_bytes(shape, shape.hidden_size, microbatch, b)
    if microbatch.has_qk_norm:
        heads = _head_widths(shape)
        # Their outputs are q and k, which attention keeps.
        kept += _norm_bytes(shape, heads, microbatch, b) - heads * b
    return kept


def _head_widths(shape: ModelShape) -> int:
    """Of queries and keys, or of values and outputs."""
    return shape.head_dim * (shape.num_heads + shape.num_kv_heads)


def _attention_bytes(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """q, k, v, out, and the log-sum-exp; of a shared pass also out by rows."""
    by_rows = 0 if microbatch.num_sharers == 1 else shape.num_heads * shape.head_dim * b
    return _attended_widths(shape, microbatch) * b + shape.num_heads * (shape.head_dim * b + 4) + by_rows


def _attended_widths(shape: ModelShape, microbatch: MicrobatchSize) -> int:
    """Of q, k and v as attention has them, in elements a row."""
    U, H, Hkv = microbatch.num_sharers, shape.num_heads, shape.num_kv_heads
    # A rank has one kv head for each of the longest runs of query heads that read one and lie on one rank.
    kv_heads = Hkv if U == 1 else H // gcd(H // U, H // Hkv)
    return shape.head_dim * (H + 2 * kv_heads)


def _is_fused(shape: ModelShape, microbatch: MicrobatchSize) -> bool:
    """Whether a compiler is known to drop what it can compute again cheaply. Experts run as they are."""
    return microbatch.is_compiled and shape.num_experts == 0


def _norm_bytes(shape: ModelShape, width: int, microbatch: MicrobatchSize, b: int) -> int:
    """Input in float32, normalised input where its weight trains, and output, which is the next product's input."""
    if _is_fused(shape, microbatch):
        return 2 * width * b  # input and output
    return width * (max(b, 4) + (1 if microbatch.adapter_rank else 2) * b)


def _mlp_bytes(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """Gate, its activation, up, and their product; for experts also the rows gathered for them and what they return."""
    K = max(shape.experts_per_token, 1)
    gathered = 2 * K * shape.hidden_size + 3 * shape.num_experts if shape.num_experts else 0
    return ((3 if _is_fused(shape, microbatch) else 4) * K * shape.intermediate_size + gathered) * b


def _mlp_gradients(shape: ModelShape, b: int) -> int:
    K = max(shape.experts_per_token, 1)
    return b * (_MLP_GRADIENTS * K * shape.intermediate_size + _RESIDUAL_GRADIENTS * shape.hidden_size)


def _attention_gradients(shape: ModelShape, microbatch: MicrobatchSize, b: int, *, on_cuda: bool) -> int:
    """Of out, q, k and v; a GPU's fastest kernel adds q's up in float32 first, and has two numbers a row and head.

    Of a shared pass those of q, k and v, as they are sent, and as they come: where that is more.
    """
    D = -(-shape.head_dim // 64) * 64
    sums = shape.num_heads * (4 * D + 8) if on_cuda else 0
    in_kernel = (_attended_widths(shape, microbatch) + shape.num_heads * shape.head_dim) * b + sums
    exchanged = 0 if microbatch.num_sharers == 1 else 3 * _attended_widths(shape, microbatch) * b
    return max(in_kernel, exchanged) + 2 * shape.hidden_size * b
