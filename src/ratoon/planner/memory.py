"""Bytes that training a decoder takes on one rank, before anything is loaded.

What the formulas count:

- Held all the time: the weights once, in the model's dtype; for 16-bit weights their float32 masters; AdamW's two
  moments, float32, of every trained weight; a frozen reference model's weights; the rollout engine's key/value cache,
  which stays between steps.
- Gradients: float32 of every trained weight, kept from one microbatch to the next. While a microbatch's backward runs,
  its own gradients grow (in the weights' dtype) as its activations shrink, so the larger of the two counts. 32-bit ones
  are added to the kept gradients one by one.
- Activations: what autograd keeps of the layers of a transformers decoder of the Llama kind, byte by byte (norms keep
  a float32 and a model-dtype copy of their input; the MLP keeps four vectors of its width; attention keeps q, k, v and
  its output). Exact for Llama and Qwen3; Gemma's extra norms and biases are left out.
- Log-prob tiles: logits exist a tile at a time.
- Not counted: the interpreter and libraries (0.5 to 1 GB of host memory, about 0.5 GB on a GPU), what the memory
  allocator cannot reuse, host copies while a checkpoint is read or written.

Estimate over measurement, float32 on a CPU (tests/planner/test_memory.py): what is held 0.92 to 0.98 of the process's
memory; the rise in backward, of what torch's allocator gave out, 0.87 to 1.02 for SmolLM2-135M and 1.04 to 1.26 for a
small Qwen3. The process's own peak is 10 to 25 % higher, because freed blocks do not fit new ones. In bfloat16 on an
H200 (tests/planner/test_memory_gpu.py): 0.99 to 1.03 in every phase and recompute mode.
"""

# Shape letters: T rows, M scored tokens, L layers, H heads, D head dim, C channels, V vocabulary, K experts per token.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ratoon.types.model_shape import ModelShape

RecomputeMode = Literal["none", "selective", "full"]

GIB = 1 << 30
_MIB = 1 << 20

_CPU_TILE_BYTES = 8 * _MIB
_CUDA_TILE_BYTES = 256 * _MIB
_TILES = 3
"""Of logits, and of the gradients made from them, alive at a time (`ratoon.ops.logprob.tiling`)."""

_BACKWARD_MLP_VECTORS = 3
"""Gradients of the MLP's width that are alive at a time while one layer's backward runs."""

_BACKWARD_RESIDUAL_VECTORS = 4
"""The same of the residual's width: its own gradient, its sum, and the norm's float32 work."""

_SAMPLING_BYTES = 24
"""A response and vocabulary entry, where a generation step draws a token: the logits in the model's dtype and in
float32, and their differences and running sum in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInMemory:
    """How many weights one rank holds, and in what."""

    num_parameters: int
    """All of the policy's, tied ones once."""

    num_trainable_parameters: int
    """Those that have gradients and moments: all, or an adapter's."""

    dtype_bytes: int
    """Of one weight and one activation: 4 for float32, 2 for bfloat16 and float16."""

    num_reference_parameters: int = 0
    """Of a frozen reference model held beside the policy; 0 where there is none, or where the policy without its
    adapter is the reference."""

    def __post_init__(self) -> None:
        if min(self.num_parameters, self.num_trainable_parameters, self.num_reference_parameters) < 0:
            raise ValueError(f"numbers of parameters must not be negative, got {self}")
        if self.dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes must be 2, 4 or 8, got {self.dtype_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSize:
    """The largest forward and backward pass of a step."""

    num_rows: int
    num_scored: int
    recompute: RecomputeMode = "none"
    has_qk_norm: bool = False
    """Each head's queries and keys are normalised (Qwen3, Gemma 3, OLMo 2)."""

    is_only_one: bool = False
    """The update has no other microbatch on this rank: no gradients wait while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSize:
    """What the in-process rollout engine holds."""

    cache_tokens: int = 0
    """Tokens of the key/value cache, over all layers."""

    num_concurrent: int = 0
    """Responses that draw a token in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes by what holds them; `peak_bytes` is the largest phase."""

    weights: int
    reference: int
    masters: int
    """float32 copies of 16-bit weights."""

    moments: int
    """AdamW's first and second."""

    cache: int
    """Keys and values of the rollout engine."""

    gradients: int
    """Of a whole update, once they are summed."""

    kept_gradients: int
    """Those of earlier microbatches, while another one runs."""

    new_gradients: int
    """A microbatch's own at the end of its backward; 0 where each is added to the kept ones as it appears."""

    activations: int
    """What forward leaves for backward."""

    scratch: int
    """What backward needs beside it: the layer it is in, and log-prob tiles."""

    optimizer_scratch: int
    generation_scratch: int

    @property
    def held(self) -> int:
        """All the time, from the first update on."""
        return self.weights + self.reference + self.masters + self.moments + self.cache

    @property
    def by_phase(self) -> Mapping[str, int]:
        """Highest bytes of each phase of a step, what is held included."""
        return {
            "generate": self.held + self.generation_scratch,
            "backward": self.held + self.kept_gradients + max(self.activations + self.scratch, self.new_gradients),
            "optimizer": self.held + self.gradients + self.optimizer_scratch,
        }

    @property
    def peak_bytes(self) -> int:
        return max(self.by_phase.values())

    @property
    def peak_phase(self) -> str:
        phases = self.by_phase
        return max(phases, key=lambda phase: phases[phase])


def estimate_memory(
    shape: ModelShape,
    weights: WeightsInMemory,
    microbatch: MicrobatchSize,
    generation: GenerationSize,
    *,
    on_cuda: bool = False,
) -> MemoryEstimate:
    """What one rank needs at most in steady state: from the second update on, at the largest microbatch."""
    b, trainable = weights.dtype_bytes, weights.num_trainable_parameters
    master_bytes = max(b, 4)
    gradients = master_bytes * trainable
    return MemoryEstimate(
        weights=b * weights.num_parameters,
        reference=b * weights.num_reference_parameters,
        masters=master_bytes * trainable if b < 4 else 0,
        moments=2 * master_bytes * trainable,
        cache=generation.cache_tokens * cache_token_bytes(shape, b),
        gradients=gradients,
        kept_gradients=0 if microbatch.is_only_one else gradients,
        # Where masters are separate, or none wait to be added to, they all stand beside the masters' for a moment.
        new_gradients=b * trainable if b < 4 or microbatch.is_only_one else 0,
        activations=activation_bytes(shape, microbatch, b),
        scratch=_scratch_bytes(shape, microbatch, b, on_cuda=on_cuda),
        # On a GPU AdamW handles all weights at once and needs the square roots of the second moments.
        optimizer_scratch=master_bytes * trainable if on_cuda else 0,
        generation_scratch=_SAMPLING_BYTES * shape.vocab_size * generation.num_concurrent,
    )


def cache_token_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes


def activation_bytes(shape: ModelShape, microbatch: MicrobatchSize, dtype_bytes: int) -> int:
    """What the layers and the head keep for backward."""
    T, M, C = microbatch.num_rows, microbatch.num_scored, shape.hidden_size
    final = T * (_norm_bytes(C, dtype_bytes) - C * dtype_bytes) + 2 * M * C * dtype_bytes + 12 * M
    return T * shape.num_layers * _layer_bytes(shape, microbatch, dtype_bytes) + final


def _layer_bytes(shape: ModelShape, microbatch: MicrobatchSize, b: int) -> int:
    """What one layer keeps of one row."""
    C = shape.hidden_size
    if microbatch.recompute == "full":
        return C * b
    heads = shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    attention = 2 * heads * b + 4 * shape.num_heads  # q, k, v, out, and the log-sum-exp
    if microbatch.recompute == "selective":
        return attention + 4 * C * b + (heads * b if microbatch.has_qk_norm else 0)
    qk_norms = _norm_bytes(heads, b) - heads * b if microbatch.has_qk_norm else 0
    return attention + 2 * _norm_bytes(C, b) + qk_norms + _mlp_bytes(shape, b)


def _norm_bytes(width: int, b: int) -> int:
    """Input in float32, normalised input, and output, which is the next product's input."""
    return width * (max(b, 4) + 2 * b)


def _mlp_bytes(shape: ModelShape, b: int) -> int:
    """Gate, its activation, up, and their product; for experts also the rows gathered for them and what they return."""
    chosen = max(shape.experts_per_token, 1)
    gathered = 2 * chosen * shape.hidden_size + 3 * shape.num_experts if shape.num_experts else 0
    return (4 * chosen * shape.intermediate_size + gathered) * b


def _scratch_bytes(shape: ModelShape, microbatch: MicrobatchSize, b: int, *, on_cuda: bool) -> int:
    """The larger of what the head's backward and one layer's need beside the activations."""
    T, M, C = microbatch.num_rows, microbatch.num_scored, shape.hidden_size
    width = max(shape.experts_per_token, 1) * shape.intermediate_size
    layer = T * b * (_BACKWARD_MLP_VECTORS * width + _BACKWARD_RESIDUAL_VECTORS * C)
    if microbatch.recompute == "selective":
        layer += T * (_mlp_bytes(shape, b) + _norm_bytes(C, b))
    if microbatch.recompute == "full":
        whole = MicrobatchSize(num_rows=T, num_scored=M, has_qk_norm=microbatch.has_qk_norm)
        layer += T * _layer_bytes(shape, whole, b)
    tile_bytes = _CUDA_TILE_BYTES if on_cuda else _CPU_TILE_BYTES
    tiles = _TILES * min(tile_bytes, 4 * M * shape.vocab_size)
    head = tiles + 4 * M * C + b * shape.vocab_size * C
    return max(layer, head)
