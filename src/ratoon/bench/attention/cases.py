"""The attention shapes that are measured, as data; no torch here."""

# Shape letters: T rows, H heads (Hkv key and value heads), D head dim, P prompt tokens, R response tokens, N responses.

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ratoon.bench import choosing
from ratoon.layout import PackedLayout, pack_documents, pack_groups, pack_sequences
from ratoon.planner import attended_pairs
from ratoon.types import Prompt, Response, RolloutGroup

_FORWARD_FLOPS = 4
"""Of one pair, a head and a channel: a multiplication and an addition in q.k, and again in p.v."""

_BACKWARD_FLOPS = 10
"""Five products for the forward's two: q.k again, dout.v, dq, dk, dv."""

_LSE_BYTES = 4


class Forest(Protocol):
    """What is packed."""

    def layout(self) -> PackedLayout: ...

    def shape(self) -> dict[str, Any]:
        """`P`, `R`, `N` and `groups` of a result row. `R` is [least, most] where lengths differ."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`groups` prompts of P tokens, each with N responses."""

    P: int

    R: int | tuple[int, int]
    """Tokens of each response; (least, most) draws them uniformly, both ends included."""

    N: int
    groups: int = 1
    seed: int = 0

    @property
    def response_lengths(self) -> list[list[int]]:
        """[groups][N]."""
        least, most = (self.R, self.R) if isinstance(self.R, int) else self.R
        rng = np.random.default_rng(self.seed)
        return rng.integers(least, most, size=(self.groups, self.N), endpoint=True).tolist()

    def layout(self) -> PackedLayout:
        return pack_groups(
            [
                RolloutGroup(Prompt(index, np.arange(self.P)), tuple(Response(np.arange(R)) for R in lengths))
                for index, lengths in enumerate(self.response_lengths)
            ]
        )

    def shape(self) -> dict[str, Any]:
        R = self.R if isinstance(self.R, int) else list(self.R)
        return {"P": self.P, "R": R, "N": self.N, "groups": self.groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One tree whose nodes at one depth are alike."""

    lengths: tuple[int, ...]
    """Tokens of a node at each depth, the root first."""

    fan_outs: tuple[int, ...]
    """Children of a node at each depth but the last."""

    def layout(self) -> PackedLayout:
        fresh = itertools.count()

        def grow(depth: int, before: list[int]) -> list[list[int]]:
            path = before + list(itertools.islice(fresh, self.lengths[depth]))
            if depth == len(self.fan_outs):
                return [path]
            return [leaf for _ in range(self.fan_outs[depth]) for leaf in grow(depth + 1, path)]

        return pack_sequences(grow(0, []))

    def shape(self) -> dict[str, Any]:
        """P is the root, R a leaf, N the leaves."""
        return {"P": self.lengths[0], "R": self.lengths[-1], "N": int(np.prod(self.fan_outs)), "groups": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents that share nothing."""

    count: int
    lengths: tuple[int, int]
    """(least, most) tokens, drawn uniformly, both ends included."""

    seed: int = 0

    def layout(self) -> PackedLayout:
        least, most = self.lengths
        lengths = np.random.default_rng(self.seed).integers(least, most, size=self.count, endpoint=True)
        return pack_documents([np.arange(length) for length in lengths])

    def shape(self) -> dict[str, Any]:
        """P is 0: there is no prompt. A document counts as a group of one response."""
        return {"P": 0, "R": list(self.lengths), "N": 1, "groups": self.count}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One attention to measure."""

    name: str
    forest: Forest
    H: int
    Hkv: int
    D: int
    window: int | None = None

    peers: tuple[str, ...]
    """Peers that are measured unless others are asked for, the ones that ratios are taken to first."""

    needs_gpu: bool = True
    """Too much for a CPU."""

    @cached_property
    def layout(self) -> PackedLayout:
        return self.forest.layout()

    @property
    def key(self) -> dict[str, Any]:
        """The `case` of a result row."""
        return {**self.forest.shape(), "H": self.H, "Hkv": self.Hkv, "D": self.D, "window": self.window}

    @cached_property
    def num_pairs(self) -> int:
        """Query-key pairs of one head, each once, inside the window."""
        return attended_pairs(self.layout.positions_T, self.window)

    @property
    def forward_flops(self) -> float:
        """Useful work: 4 · H · D · pairs, of the shared layout whoever runs it."""
        return float(_FORWARD_FLOPS * self.H * self.D * self.num_pairs)

    @property
    def backward_flops(self) -> float:
        """Useful work: 10 · H · D · pairs."""
        return float(_BACKWARD_FLOPS * self.H * self.D * self.num_pairs)

    def forward_bytes(self, element_size: int) -> float:
        """Least traffic: q, k, v read once, the output and its log-sum-exp written once."""
        T = self.layout.num_rows
        return float(T * (2 * (self.H + self.Hkv) * self.D * element_size + self.H * _LSE_BYTES))

    def backward_bytes(self, element_size: int) -> float:
        """Least traffic: q, k, v, output, its gradient and its log-sum-exp read once, three gradients written once."""
        T = self.layout.num_rows
        return float(T * (4 * (self.H + self.Hkv) * self.D * element_size + self.H * _LSE_BYTES))

    def floors_ms(
        self, *, matmul_tflops: float, copy_tb_per_s: float, element_size: int
    ) -> dict[str, tuple[float, float]]:
        """direction -> (ms to do the FLOPs at the rate of a matrix product, ms to move the bytes at that of a copy)."""
        work = {
            "fwd": (self.forward_flops, self.forward_bytes(element_size)),
            "bwd": (self.backward_flops, self.backward_bytes(element_size)),
        }
        return {
            direction: (flops / matmul_tflops / 1e9, moved / copy_tb_per_s / 1e9)
            for direction, (flops, moved) in work.items()
        }


def uniform_twin(ragged: Groups) -> Groups:
    """The same work as one uniform group.

    Same work: a prompt as long, and the N and R for which useful FLOPs (pairs) and rows come nearest to those of
    `ragged`, measured by the larger of the two relative gaps. Of equally near ones the smallest N is taken.
    """
    P = ragged.P
    lengths = np.array(ragged.response_lengths)
    rows = ragged.groups * P + lengths.sum()
    pairs = ragged.groups * P * (P + 1) // 2 + (lengths * P + lengths * (lengths + 1) // 2).sum()
    N = np.arange(1, rows - P + 1)
    R = np.rint((rows - P) / N).astype(np.int64)
    row_gap = np.abs((P + N * R) / rows - 1)
    pair_gap = np.abs((P * (P + 1) // 2 + N * (R * P + R * (R + 1) // 2)) / pairs - 1)
    nearest = int(np.maximum(row_gap, pair_gap).argmin())
    return Groups(P=P, R=int(R[nearest]), N=int(N[nearest]))


_REPLICATED = ("fa4", "fa2")
_ALL_PEERS = ("fa4", "fa2", "kv-copy-fa4", "flex-triton", "cudnn")
_RAGGED = Groups(P=1024, R=(64, 2048), N=8, groups=16)
_LOCAL_GLOBAL = Groups(P=8192, R=512, N=16)

# In the order in which they are measured: what the targets are set on first.
_CASES = (
    AttentionCase(
        name="p8192-r1024-n16", forest=Groups(P=8192, R=1024, N=16), H=32, Hkv=8, D=128, peers=_ALL_PEERS
    ),
    AttentionCase(
        name="p2048-r4096-n16",
        forest=Groups(P=2048, R=4096, N=16),
        H=32, Hkv=8, D=128, peers=("fa4", "fa2", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="p2048-r512-n8",
        forest=Groups(P=2048, R=512, N=8),
        H=32, Hkv=8, D=128, peers=("fa4", "fa2", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="p8192-r512-n16-d256",
        forest=Groups(P=8192, R=512, N=16),
        H=16, Hkv=8, D=256, peers=("fa4", "fa2", "kv-copy-fa4", "flex-triton"),
    ),
    AttentionCase(
        name="p8192-r512-n16-d512", forest=_LOCAL_GLOBAL, H=8, Hkv=4, D=512, peers=("flex-triton",)
    ),
    AttentionCase(
        name="p8192-r512-n32",
        forest=Groups(P=8192, R=512, N=32),
        H=32, Hkv=8, D=128, peers=("fa4", "fa2", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="ragged-16-groups", forest=_RAGGED, H=32, Hkv=8, D=128, peers=("fa4", "kv-copy-fa4")
    ),
    AttentionCase(
        name="ragged-16-groups-uniform-twin", forest=uniform_twin(_RAGGED), H=32, Hkv=8, D=128, peers=()
    ),
    AttentionCase(
        name="documents", forest=Documents(count=16, lengths=(256, 8192)), H=32, Hkv=8, D=128, peers=_REPLICATED
    ),
    AttentionCase(
        name="p32768-r2048-n28",
        forest=Groups(P=32768, R=2048, N=28),
        H=32, Hkv=8, D=128, peers=("fa4", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="tree-depth-4",
        forest=Tree(lengths=(4096, 2048, 1024, 1024, 512), fan_outs=(2, 2, 2, 4)),
        H=32, Hkv=8, D=128, peers=("fa4", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="p8192-r512-n16-d256-window1024",
        forest=_LOCAL_GLOBAL,
        H=8, Hkv=4, D=256, window=1024, peers=("fa4", "fa2", "kv-copy-fa4"),
    ),
    AttentionCase(
        name="tiny-group", forest=Groups(P=64, R=48, N=4), H=4, Hkv=2, D=32, peers=_ALL_PEERS, needs_gpu=False
    ),
    AttentionCase(
        name="tiny-ragged",
        forest=Groups(P=37, R=(1, 40), N=3, groups=3),
        H=4, Hkv=2, D=32, peers=_ALL_PEERS, needs_gpu=False,
    ),
    AttentionCase(
        name="tiny-tree",
        forest=Tree(lengths=(19, 9, 5, 7), fan_outs=(2, 2, 2)),
        H=4, Hkv=2, D=32, peers=_ALL_PEERS, needs_gpu=False,
    ),
    AttentionCase(
        name="tiny-documents",
        forest=Documents(count=5, lengths=(1, 60)),
        H=4, Hkv=2, D=32, peers=_ALL_PEERS, needs_gpu=False,
    ),
    AttentionCase(
        name="tiny-window",
        forest=Groups(P=40, R=(1, 30), N=3, groups=2),
        H=4, Hkv=2, D=32, window=11, peers=_ALL_PEERS, needs_gpu=False,
    ),
)  # fmt: skip

CASES = {case.name: case for case in _CASES}


def choose_cases(names: Sequence[str] | None, *, has_gpu: bool) -> list[AttentionCase]:
    """As `choosing.choose_cases`; None takes all large ones on a GPU, the tiny ones elsewhere."""
    if names is None:
        return [case for case in CASES.values() if case.needs_gpu == has_gpu]
    return choosing.choose_cases(names, CASES, "attention case", has_gpu=has_gpu)
