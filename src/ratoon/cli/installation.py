"""What is installed here, what that lets Ratoon do, and which attention a model would get."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import ratoon
from ratoon.attention import AttentionRequest, available_impls, explain_choice
from ratoon.attention.choice_table import architecture_of
from ratoon.attention.request import Feature
from ratoon.rollout import RolloutConfig
from ratoon.rollout.available import engine_statuses
from ratoon.types.extras import install_command

_PACKAGES = {
    "torch": "",
    "transformers": "",
    "numpy": "",
    "pyarrow": "rollout tables",
    "safetensors": "weights",
    "reasoning-gym": "verifiable tasks (extra: reasoning)",
    "math-verify": "answers compared as mathematics (extra: math)",
    "gguf": "GGUF model folders (extra: gguf)",
    "accelerate": "GGUF model folders (extra: gguf)",
    "peft": "low-rank adapters (extra: lora), beside weights in 4 bits (extra: qlora)",
    "bitsandbytes": "weights in 4 bits (extra: qlora), moments in 8 bits (extra: 8bit)",
    "tensorboard": "a run's numbers elsewhere (extra: tensorboard)",
    "wandb": "a run's numbers elsewhere (extra: wandb)",
    "trackio": "a run's numbers elsewhere (extra: trackio)",
    "triton": "attention: triton, flex-triton",
    "flash-attn-4": "attention: flash-fa4, flex-fa4",
}

_HEAD_DIMS = (64, 128, 256, 512)


_LAYER_KINDS: dict[str, frozenset[Feature]] = {
    "global": frozenset(),
    "sliding-window": frozenset({"sliding window"}),
}


def report() -> str:
    """The report as lines of text. Reads the machine; changes nothing and loads no model."""
    return "\n".join([*_machine(), "", *_packages(), "", *_engines(), "", *_attention()])


def _machine() -> list[str]:
    lines = [
        f"ratoon {ratoon.__version__}, Python {platform.python_version()} ({sys.executable})",
        f"CPU: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory_gib = properties.total_memory / 2**30
            capability = f"{properties.major}.{properties.minor}"
            lines.append(f"GPU {index}: {properties.name}, {memory_gib:.0f} GiB, compute capability {capability}")
    else:
        lines.append("GPU: none that torch can use; training and rollout run on the CPU")
    free_gib = shutil.disk_usage(".").free / 2**30
    lines.append(f"Disk: {free_gib:.0f} GiB free in the current folder, where runs/ is written")
    return lines


def _packages() -> list[str]:
    lines = [f"Packages (an extra is installed with: {install_command('EXTRA')}):"]
    for name, purpose in _PACKAGES.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        lines.append(f"  {name:<14} {found:<16} {purpose}".rstrip())
    return lines


def _engines() -> list[str]:
    has_gpu = torch.cuda.is_available()
    device_type = "cuda" if has_gpu else "cpu"
    usual = RolloutConfig().engine_on(device_type, is_quantised=False, is_batch_invariant=False)
    lines = [f'Rollout engines (rollout.engine = "auto" takes {usual} on {device_type}):']
    for status in engine_statuses(has_gpu=has_gpu):
        lines.append(f"  {'yes' if status.is_available else 'no ':<4}{status.name:<14} {status.reason}")
    return lines


def _attention() -> list[str]:
    lines = ["Attention implementations:"]
    for status in available_impls():
        lines.append(f"  {'yes' if status.is_available else 'no ':<4}{status.name:<14} {status.reason}")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    lines.append(f'attention = "auto" on {device_type} ({architecture_of(device_type)}) takes:')
    for dtype in (torch.bfloat16, torch.float32):
        for kind, features in _LAYER_KINDS.items():
            lines += _choices(device_type, dtype, kind, features)
    return lines


def _choices(device_type: str, dtype: torch.dtype, kind: str, features: frozenset[Feature]) -> list[str]:
    """What `auto` takes for common head dims, a line for each choice."""
    head_dims: dict[str, list[int]] = {}
    for head_dim in _HEAD_DIMS:
        request = AttentionRequest(
            device_type=device_type, dtype=dtype, head_dim=head_dim, v_head_dim=head_dim, features=features
        )
        line = explain_choice(request, "auto", f"{kind}, {str(dtype).removeprefix('torch.')}")
        head_dims.setdefault(line, []).append(head_dim)
    return [f"  head dim {', '.join(map(str, dims))}: {line}" for line, dims in head_dims.items()]
