"""Bytes that training a decoder takes on one rank, before anything is loaded.

What the formulas count:

- Held all the time: the weights once, in the model's dtype, or beneath adapters in 4 bits; for 16-bit weights that
  train their float32 masters; AdamW's two moments of every trained weight, in float32 or in blocks of 8-bit codes; a
  frozen reference model's weights; the rollout engine's key/value cache, which stays between steps.
- Gradients: float32 of every trained weight, kept from one microbatch to the next. While a microbatch's backward runs,
  its own gradients grow (in the weights' dtype) as its activations shrink, so that one end or the other has the most:
  the last layer's backward, the first layer's, or the moment after, when 16-bit gradients are added to the kept ones.
  32-bit ones are added one by one.
- Activations and a layer's backward: `activation_memory`. Log-prob tiles: `head_memory`.
- A model cut over ranks (`Shards`): parts of float32 weights, moments and gradients; gathered in the model's dtype, the
  root (embedding, last norm, head) and the layers at work, with the gradient that a layer has before it is summed; and
  in that dtype a whole copy to sample from.
- Not counted: the interpreter and libraries (0.5 to 1 GB of host memory, about 0.5 GB on a GPU), what the memory
  allocator cannot reuse, host copies while a checkpoint is read or written.

Estimate over measurement, float32 on a CPU (tests/planner/test_memory.py): what is held 0.92 to 0.98 of the process's
memory; the rise in backward, of what torch's allocator gave out, 0.87 to 1.02 for SmolLM2-135M and 1.04 to 1.26 for a
small Qwen3. The process's own peak is 10 to 25 % higher, because freed blocks do not fit new ones. On a GPU:
`ratoon bench memory`.
"""

# Shape letters: T rows, M scored tokens, L layers, C channels, V vocabulary.

from collections.abc import Mapping
from dataclasses import dataclass

from ratoon.planner.activation_memory import activation_bytes, layer_activation_bytes, layer_scratch_bytes
from ratoon.planner.head_memory import head_scratch_bytes
from ratoon.planner.memory_sizes import (
    WHOLE,
    GenerationSize,
    MicrobatchSize,
    Shards,
    WeightsInMemory,
    eight_bit_bytes,
    four_bit_bytes,
)
from ratoon.types.model_shape import ModelShape

_SAMPLING_BYTES = 24
"""A response and vocabulary entry, where a generation step draws a token: the logits in the model's dtype and in
float32, and their differences and running sum in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank by what holds them; `peak_bytes` is the largest phase."""

    weights: int
    reference: int
    masters: int
    """float32 copies of 16-bit weights; where the model is cut over ranks, the parts that are trained."""

    moments: int
    """AdamW's first and second."""

    cache: int
    """Keys and values of the rollout engine."""

    sampling_copy: int
    """The whole model once more, to sample from; 0 where the model is not cut."""

    gathered: int
    """Weights of other ranks, while layers run; 0 where the model is not cut."""

    gradients: int
    """Of a whole update, once they are summed."""

    kept_gradients: int
    """Those of earlier microbatches, while another one runs."""

    activations: int
    """What forward leaves for backward."""

    scratch: int
    """What the backward of the head, or of the last layer, needs beside them: the larger."""

    late: int
    """At the end of backward, instead of these two: a microbatch's own gradients, and what is left of activations."""

    optimizer_scratch: int
    generation_scratch: int
    on_host: int
    """Page-locked memory beside the device's: masters, moments and gradients that are updated there."""

    @property
    def held(self) -> int:
        """All the time, from the first update on."""
        return self.weights + self.reference + self.masters + self.moments + self.cache + self.sampling_copy

    @property
    def by_phase(self) -> Mapping[str, int]:
        """Highest bytes of each phase of a step, what is held included."""
        return {
            "generate": self.held + self.generation_scratch,
            "backward": self.held
            + self.gathered
            + self.kept_gradients
            + max(self.activations + self.scratch, self.late),
            "optimizer": self.held + self.gradients + self.optimizer_scratch,
        }

    @property
    def update_bytes(self) -> int:
        """Highest of the phases that the trainer's update is made of."""
        phases = self.by_phase
        return max(phases["backward"], phases["optimizer"])

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
    shards: Shards = WHOLE,
) -> MemoryEstimate:
    """What one rank needs at most in steady state: from the second update on, at the largest microbatch.

    microbatch: one rank's. shards: how the weights are cut; with adapters the frozen ones are cut too.
    """
    b, trainable = weights.dtype_bytes, weights.num_trainable_parameters
    is_cut, is_on_host = shards.num_shards > 1, weights.is_optimizer_on_host
    master_bytes = max(b, 4)
    summed = shards.part(master_bytes * trainable)
    in_four_bits = weights.num_four_bit_parameters
    kept_frozen = b * (weights.num_parameters - in_four_bits - (trainable if is_cut else 0))
    return MemoryEstimate(
        weights=shards.part(kept_frozen + four_bit_bytes(in_four_bits)),
        reference=shards.part(b * weights.num_reference_parameters),
        masters=summed if (is_cut or b < 4) and not is_on_host else 0,
        moments=0 if is_on_host else 2 * (eight_bit_bytes(trainable) if weights.has_eight_bit_moments else summed),
        cache=generation.cache_tokens * cache_token_bytes(shape, b),
        sampling_copy=b * weights.num_parameters if is_cut else 0,
        gathered=_gathered_bytes(shape, weights, shards) if is_cut else 0,
        gradients=summed,
        kept_gradients=0 if microbatch.is_only_one else summed,
        activations=activation_bytes(shape, microbatch, b),
        scratch=_scratch_bytes(shape, weights, microbatch, shards, on_cuda=on_cuda),
        late=_late_bytes(shape, weights, microbatch, shards, on_cuda=on_cuda),
        optimizer_scratch=_optimizer_scratch_bytes(shape, weights, on_cuda=on_cuda),
        generation_scratch=_SAMPLING_BYTES * shape.vocab_size * generation.num_concurrent,
        on_host=4 * summed if is_on_host else 0,
    )


def cache_token_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes


def _root_parameters(shape: ModelShape) -> int:
    """Embedding, last norm and head."""
    return shape.hidden_size * (shape.vocab_size * (1 if shape.tied_embeddings else 2) + 1)


def _layer_parameters(shape: ModelShape, weights: WeightsInMemory) -> int:
    return max(weights.num_parameters - _root_parameters(shape), 0) // shape.num_layers


def _gathered_bytes(shape: ModelShape, weights: WeightsInMemory, shards: Shards) -> int:
    layers = min(shards.num_gathered_layers, shape.num_layers) * _layer_parameters(shape, weights)
    return weights.dtype_bytes * (_root_parameters(shape) + layers)


def _scratch_bytes(
    shape: ModelShape, weights: WeightsInMemory, microbatch: MicrobatchSize, shards: Shards, *, on_cuda: bool
) -> int:
    """The larger of what the head's backward and the last layer's need beside the activations."""
    b = weights.dtype_bytes
    is_trained = weights.are_all_trained
    head = head_scratch_bytes(shape, microbatch, b, is_trained=is_trained, on_cuda=on_cuda)
    layer = layer_scratch_bytes(shape, microbatch, b, on_cuda=on_cuda)
    if shards.num_shards > 1 or _stand_by_themselves(weights, microbatch):
        layer += b * shape.vocab_size * shape.hidden_size if is_trained else 0  # the head's, while layers run
    if weights.num_four_bit_parameters:
        layer += b * shape.hidden_size * shape.intermediate_size  # the largest weight, made anew for a product
    return max(head, layer + _unsummed_bytes(shape, weights, shards))


def _late_bytes(
    shape: ModelShape, weights: WeightsInMemory, microbatch: MicrobatchSize, shards: Shards, *, on_cuda: bool
) -> int:
    """The most at the end of backward, when all but the first layer's activations are gone."""
    b, trainable = weights.dtype_bytes, weights.num_trainable_parameters
    first_layer = layer_activation_bytes(shape, microbatch, b)
    first_layer += layer_scratch_bytes(shape, microbatch, b, on_cuda=on_cuda)
    embedding = shape.vocab_size * shape.hidden_size if weights.are_all_trained else 0
    if shards.num_shards > 1:
        # This microbatch's sums, and the root's gradient as it comes and in float32, to be summed.
        own = shards.part(max(b, 4) * trainable)
        root = _root_parameters(shape) if weights.are_all_trained else 0
        return own + max(first_layer + b * root + _unsummed_bytes(shape, weights, shards), (b + max(b, 4)) * root)
    own = b * trainable if _stand_by_themselves(weights, microbatch) else 0
    while_layers_run = own - (0 if shape.tied_embeddings else b * embedding)
    # A tied embedding's gradient comes after the head's. Then 16-bit gradients are widened one by one.
    afterwards = max(b * embedding if shape.tied_embeddings or not own else 0, 4 * embedding if b < 4 else 0)
    return max(first_layer + max(while_layers_run, 0), own + afterwards)


def _optimizer_scratch_bytes(shape: ModelShape, weights: WeightsInMemory, *, on_cuda: bool) -> int:
    """A GPU's updates are fused and need nothing; on a CPU AdamW goes from weight to weight."""
    if on_cuda or not weights.has_eight_bit_moments:
        return 0
    # Both moments of a tensor, its gradient and two results in float32.
    return 5 * 4 * shape.vocab_size * shape.hidden_size if weights.are_all_trained else 0


def _stand_by_themselves(weights: WeightsInMemory, microbatch: MicrobatchSize) -> bool:
    """Whether a microbatch's gradients are not added to the kept ones as they appear."""
    return weights.dtype_bytes < 4 or microbatch.is_only_one or weights.is_optimizer_on_host


def _unsummed_bytes(shape: ModelShape, weights: WeightsInMemory, shards: Shards) -> int:
    """A layer's gradients before they are summed over ranks: as they come, and in float32."""
    if shards.num_shards == 1 or not weights.are_all_trained:
        return 0
    b = weights.dtype_bytes
    return (b + max(b, 4)) * _layer_parameters(shape, weights)
