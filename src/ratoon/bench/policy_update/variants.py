"""Ways of doing an update, by name: whose, what is computed again, what is compiled. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ratoon.models.config import Compile, Recompute

Impl = Literal["auto", "fa2", "fa4", "kv-copy-fa4"]

OURS: tuple[Impl, ...] = ("auto",)
PEERS: tuple[Impl, ...] = ("fa2", "fa4", "kv-copy-fa4")

PEERS_TODAY = "fa2-today"
"""What most users run: FA2 packed with the prompt replicated, full recomputation, not compiled, 4 sequences a
microbatch."""

_SEQUENCES_TODAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of doing a case's work."""

    name: str
    impl: Impl
    recompute: Recompute
    compile: Compile

    sequences: int | None = None
    """Of a replicated microbatch; None for about the rows of our microbatch."""

    @classmethod
    def named(cls, name: str) -> "Variant":
        """`IMPL/RECOMPUTE/COMPILE`, or `fa2-today`. The name must be of `OUR_VARIANTS` or `PEER_VARIANTS`."""
        return _VARIANTS[name]

    @property
    def is_peer(self) -> bool:
        return self.impl not in OURS

    @property
    def layout(self) -> Literal["shared", "replicated"]:
        return "replicated" if self.impl in ("fa2", "fa4") else "shared"


def under(impls: Sequence[Impl], recompute: Recompute, compile: Compile) -> tuple[str, ...]:
    """Names of these under one setting."""
    return tuple(f"{impl}/{recompute}/{compile}" for impl in impls)


def _grid(impls: Sequence[Impl]) -> list[Variant]:
    return [
        Variant(name=f"{impl}/{recompute}/{compile}", impl=impl, recompute=recompute, compile=compile)
        for impl in impls
        for recompute in get_args(Recompute)
        for compile in get_args(Compile)
    ]


_TODAY = Variant(name=PEERS_TODAY, impl="fa2", recompute="full", compile="none", sequences=_SEQUENCES_TODAY)
_VARIANTS = {variant.name: variant for variant in (*_grid(OURS), _TODAY, *_grid(PEERS))}

OUR_VARIANTS = tuple(name for name, variant in _VARIANTS.items() if not variant.is_peer)
PEER_VARIANTS = tuple(name for name, variant in _VARIANTS.items() if variant.is_peer)
