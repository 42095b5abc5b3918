"""The names that each benchmark takes, for its help.

They are spelled here because the benchmarks' own tables import torch, which no help waits for.
"""

import textwrap
from dataclasses import dataclass

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNames:
    """What may be named. `a/{b,c}` stands for `a/b` and `a/c`."""

    gpu_cases: tuple[str, ...]
    small_cases: tuple[str, ...] = ()
    """Those that a CPU can do."""

    impls: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def text(self) -> str:
        """Lines for the end of a help: each option's names, in the order of the benchmark's tables."""
        named = {
            "--cases, on a GPU": self.gpu_cases,
            "--cases, anywhere": self.small_cases,
            "--impls": self.impls,
            "--peers": self.peers,
            "--ways": self.ways,
        }
        lines = ["names:"]
        for option, names in named.items():
            if names:
                or_none = "" if option.startswith("--cases") else ", or none"
                lines += textwrap.wrap(
                    f"  {option:<19}{' '.join(names)}{or_none}",
                    _WIDTH,
                    subsequent_indent=" " * 21,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
        return "\n".join(lines)


_RECOMPUTE_AND_COMPILE = "{none,selective,full}/{none,layers}"

NAMES = {
    "policy-update": BenchNames(
        gpu_cases=(
            "1.7b-p8192-r512-n16",
            "1.7b-p2048-r2048-n16",
            "8b-p8192-r1024-n16",
            "8b-lora-p8192-r1024-n16",
            "30b-a3b-cut-p8192-r512-n16",
        ),
        small_cases=("tiny", "tiny-lora", "tiny-experts"),
        impls=(f"auto/{_RECOMPUTE_AND_COMPILE}",),
        peers=("fa2-today", f"{{fa2,fa4,kv-copy-fa4}}/{_RECOMPUTE_AND_COMPILE}"),
    ),
    "attention": BenchNames(
        gpu_cases=(
            "p8192-r1024-n16",
            "p2048-r4096-n16",
            "p2048-r512-n8",
            "p8192-r512-n16-d256",
            "p8192-r512-n16-d512",
            "p8192-r512-n32",
            "ragged-16-groups",
            "ragged-16-groups-uniform-twin",
            "documents",
            "p32768-r2048-n28",
            "tree-depth-4",
            "p8192-r512-n16-d256-window1024",
        ),
        small_cases=("tiny-group", "tiny-ragged", "tiny-tree", "tiny-documents", "tiny-window"),
        impls=(
            "auto",
            "flash-fa4",
            "triton-adding",
            "triton",
            "flex-fa4",
            "flash-fa3",
            "flash-fa2",
            "flex-triton",
            "invariant",
            "flash-cpu",
            "reference",
        ),
        peers=("fa4", "fa2", "kv-copy-fa4", "flex-triton", "cudnn"),
    ),
    "sequence-parallel": BenchNames(gpu_cases=("8b-cut-131072", "1.7b-131072"), small_cases=("tiny",)),
    "prefix-once": BenchNames(gpu_cases=("1.7b-p16384-r4096-n64",), small_cases=("tiny",)),
    "weak-scaling": BenchNames(
        gpu_cases=(
            "1.7b-p8192-r512-n16",
            "1.7b-p2048-r2048-n16",
            "8b-p8192-r1024-n16",
            "8b-lora-p8192-r1024-n16",
        ),
        small_cases=("tiny", "tiny-lora"),
        ways=(f"{_RECOMPUTE_AND_COMPILE}/{{reshard,keep}}/{{1,2}}",),
    ),
    "rollout": BenchNames(
        gpu_cases=("135m-c256-p512-n8-r256", "1.7b-c256-p512-n8-r256", "1.7b-c64-p8192-n16-r512"),
        small_cases=("135m-c16-p128-n8-r32", "tiny"),
        impls=("paged", "paged-invariant"),
        peers=("transformers", "vllm", "vllm-generate"),
        ways=("shared", "replicated", "natural", "updates"),
    ),
    "memory": BenchNames(
        gpu_cases=(
            "1.7b-none-compiled",
            "1.7b-selective-compiled",
            "0.6b-none",
            "0.6b-selective",
            "0.6b-full-long",
            "0.6b-few-rows",
            "0.6b-none-compiled",
            "0.6b-full-compiled",
            "135m-none",
            "135m-selective-compiled",
        ),
    ),
}
"""By the benchmark's name. `planner` takes sizes, not names."""
