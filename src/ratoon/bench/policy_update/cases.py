"""The policy updates that are measured, as data; no torch here."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ratoon.bench import choosing
from ratoon.bench.policy_update.variants import PEERS_TODAY, under
from ratoon.types import Prompt, Response, RolloutGroup

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A Qwen3 by its sizes, as its published configuration has them; weights are random."""

    name: str
    hidden_size: int
    intermediate_size: int
    """Of the dense MLP, or of one expert."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """One group of N responses of R tokens to one prompt of P."""

    name: str
    decoder: Decoder
    P: int
    R: int
    N: int

    ours: tuple[str, ...]
    """Variants of ours that are measured unless others are asked for, the one that ratios are taken of first."""

    peers: tuple[str, ...]

    lora_rank: int = 0
    """Of adapters beside all linear layers, whose weights are frozen; 0: every weight trains."""

    needs_gpu: bool = True
    is_default: bool = True

    @cached_property
    def groups(self) -> tuple[RolloutGroup, ...]:
        return (make_group(self.decoder.vocab_size, self.P, [self.R] * self.N, _SEED),)

    @property
    def key(self) -> dict[str, Any]:
        """The `case` of a result row."""
        key = {"model": self.decoder.name, "P": self.P, "R": self.R, "N": self.N, "groups": 1}
        return key | {"lora_rank": self.lora_rank} if self.lora_rank else key

    @property
    def sequences_of_peers(self) -> int:
        """Sequences of a replicated microbatch with about the rows of our one: the largest divisor of N that is not
        over them by more than a tenth, at least 1."""
        most = 1.1 * (self.P + self.N * self.R)
        return max((n for n in range(1, self.N + 1) if self.N % n == 0 and n * (self.P + self.R) <= most), default=1)


def make_group(vocab_size: int, P: int, lengths: Sequence[int], seed: int) -> RolloutGroup:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    prompt = Prompt(f"bench-{seed}", rng.integers(0, vocab_size, P))
    return RolloutGroup(prompt, tuple(Response(rng.integers(0, vocab_size, R)) for R in lengths))


_QWEN3_1_7B = Decoder(
    name="Qwen3-1.7B",
    hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, num_kv_heads=8, tied_embeddings=True,
)  # fmt: skip
_QWEN3_8B = Decoder(
    name="Qwen3-8B", hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, num_kv_heads=8
)
_QWEN3_30B_A3B_CUT = Decoder(
    name="Qwen3-30B-A3B (8 of 48 layers)",
    hidden_size=2048, intermediate_size=768, num_layers=8, num_heads=32, num_kv_heads=4,
    num_experts=128, experts_per_token=8,
)  # fmt: skip
_TINY = Decoder(
    name="tiny-Qwen3",
    hidden_size=48, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=257,
    tied_embeddings=True,
)  # fmt: skip
_TINY_EXPERTS = replace(
    _TINY, name="tiny-Qwen3-MoE", intermediate_size=24, num_experts=32, experts_per_token=8, tied_embeddings=False
)

_FAST = "auto/none/layers"
_FEW = (_FAST, "auto/full/none")

# In the order in which they are measured: what the targets are set on first.
_CASES = (
    UpdateCase(
        name="1.7b-p8192-r512-n16", decoder=_QWEN3_1_7B, P=8192, R=512, N=16,
        ours=(_FAST, "auto/full/none", "auto/selective/layers"),
        peers=(PEERS_TODAY, "fa4/none/layers", "kv-copy-fa4/none/layers", "fa2/none/layers"),
    ),
    UpdateCase(
        name="1.7b-p2048-r2048-n16", decoder=_QWEN3_1_7B, P=2048, R=2048, N=16,
        ours=_FEW, peers=("fa4/none/layers", PEERS_TODAY, "kv-copy-fa4/none/layers"),
    ),
    UpdateCase(
        name="8b-p8192-r1024-n16", decoder=_QWEN3_8B, P=8192, R=1024, N=16,
        ours=("auto/selective/layers", _FAST), peers=("fa4/selective/layers",),
    ),
    UpdateCase(
        name="8b-lora-p8192-r1024-n16", decoder=_QWEN3_8B, P=8192, R=1024, N=16,
        ours=(_FAST, "auto/selective/layers"), peers=("fa4/selective/layers",), lora_rank=32, is_default=False,
    ),
    UpdateCase(
        name="30b-a3b-cut-p8192-r512-n16", decoder=_QWEN3_30B_A3B_CUT, P=8192, R=512, N=16,
        ours=("auto/none/none", "auto/none/layers"),
        peers=("fa4/none/none", "fa4/none/layers", "kv-copy-fa4/none/none"),
        is_default=False,
    ),
    UpdateCase(
        name="tiny", decoder=_TINY, P=57, R=19, N=6,
        ours=("auto/none/none", "auto/selective/none", "auto/full/none"),
        peers=under(("fa2", "fa4", "kv-copy-fa4"), "none", "none"), needs_gpu=False,
    ),
    UpdateCase(
        name="tiny-lora", decoder=_TINY, P=41, R=11, N=4,
        ours=("auto/none/none", "auto/selective/none"), peers=("fa4/selective/none",),
        lora_rank=4, needs_gpu=False, is_default=False,
    ),
    UpdateCase(
        name="tiny-experts", decoder=_TINY_EXPERTS, P=41, R=11, N=4,
        ours=("auto/none/none",), peers=("fa4/none/none",), needs_gpu=False, is_default=False,
    ),
)  # fmt: skip

CASES = {case.name: case for case in _CASES}


def choose_cases(names: Sequence[str] | None, *, has_gpu: bool) -> list[UpdateCase]:
    """As `choosing.choose_cases`; None takes the usual ones of the machine."""
    if names is None:
        return [case for case in CASES.values() if case.needs_gpu == has_gpu and case.is_default]
    return choosing.choose_cases(names, CASES, "policy update", has_gpu=has_gpu)
