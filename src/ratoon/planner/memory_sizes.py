"""What the memory estimate is asked about: weights, how they are cut and updated, a microbatch, and generation."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from dataclasses import dataclass, replace
from typing import Literal

RecomputeMode = Literal["none", "selective", "full"]

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInMemory:
    """How many weights a model has, and in what they are held."""

    num_parameters: int
    """All of the policy's, tied ones once."""

    num_trainable_parameters: int
    """Those that have gradients and moments: all, or an adapter's."""

    dtype_bytes: int
    """Of one weight and one activation: 4 for float32, 2 for bfloat16 and float16."""

    num_reference_parameters: int = 0
    """Of a frozen reference model held beside the policy; 0 where there is none, or where the policy without its
    adapter is the reference."""

    num_four_bit_parameters: int = 0
    """Of those that do not train, held in 4 bits (`four_bit_bytes`)."""

    is_optimizer_on_host: bool = False
    """Moments and float32 weights are in host memory, and updated there."""

    has_eight_bit_moments: bool = False
    """Moments are held in blocks of 8-bit codes (`eight_bit_bytes`)."""

    def __post_init__(self) -> None:
        if min(self.num_parameters, self.num_trainable_parameters, self.num_reference_parameters) < 0:
            raise ValueError(f"numbers of parameters must not be negative, got {self}")
        if self.dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes must be 2, 4 or 8, got {self.dtype_bytes}")
        if self.has_eight_bit_moments and self.is_optimizer_on_host:
            raise ValueError("8-bit moments are updated where the weights are, not on the host; choose one of the two")

    @property
    def are_all_trained(self) -> bool:
        return self.num_trainable_parameters == self.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Over how many ranks a model is cut, and how much of it a rank gathers at a time."""

    num_shards: int = 1
    """1: every rank holds the whole model."""

    num_gathered_layers: int = 2
    """The one that computes, and those that are being fetched ahead."""

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_gathered_layers < 1:
            raise ValueError(f"num_shards and num_gathered_layers must be at least 1, got {self}")

    def part(self, num_bytes: int) -> int:
        """Of `num_bytes` cut evenly, the largest rank's."""
        return -(-num_bytes // self.num_shards)


WHOLE = Shards()


def four_bit_bytes(num_weights: int) -> int:
    """Of weights in blocks of 64 codes: half a byte each, and a block's float32 scale."""
    return -(-num_weights // 2) + 4 * -(-num_weights // 64)


def eight_bit_bytes(num_weights: int) -> int:
    """Of one moment in blocks of 256 codes: a byte each, and a block's float32 scale."""
    return num_weights + 4 * -(-num_weights // 256)


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

    is_compiled: bool = False
    """Decoder layers run through torch.compile."""

    adapter_rank: int = 0
    """Of adapters on every linear layer, beside weights that are frozen; 0: the weights themselves train."""

    num_kept_rows: int = 0
    """Of `num_rows`: a prompt's that was computed before, for this pass and others (`StepPlan.kept_runs`)."""

    num_sharers: int = 1
    """Ranks that hold the pass together: rows and scored tokens are one rank's, and attention runs on all rows of some
    heads."""

    def share(self, num_sharers: int) -> "MicrobatchSize":
        """What each of `num_sharers` ranks has of a pass that none shares yet: the largest part."""
        assert self.num_sharers == 1, "a pass is shared out once"
        return replace(
            self,
            num_rows=-(-self.num_rows // num_sharers),
            num_scored=-(-self.num_scored // num_sharers),
            num_sharers=num_sharers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSize:
    """What the in-process rollout engine holds."""

    cache_tokens: int = 0
    """Tokens of the key/value cache, over all layers."""

    num_concurrent: int = 0
    """Responses that draw a token in one forward pass."""
