"""What is installed here, what that lets Ratoon do, and which attention a model would get."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import ratoon
from ratoon.attention.impls import AttentionRequest, Feature, available_impls, resolve_impl
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
    "peft": "low-rank adapters (extra: lora)",
    "tensorboard": "a run's numbers elsewhere (extra: tensorboard)",
    "wandb": "a run's numbers elsewhere (extra: wandb)",
    "trackio": "a run's numbers elsewhere (extra: trackio)",
    "triton": "fused GPU kernels",
}


_LAYER_KINDS: dict[str, frozenset[Feature]] = {
    "global": frozenset(),
    "sliding-window": frozenset({"sliding window"}),
}


def report() -> str:
    """The report as lines of text. Reads the machine; changes nothing and loads no model."""
    return "\n".join([*_machine(), "", *_packages(), "", *_attention()])


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


def _attention() -> list[str]:
    lines = ["Attention implementations:"]
    for status in available_impls():
        name = f"{status.impl} ({status.provider})" if status.provider else status.impl
        lines.append(f"  {'yes' if status.is_available else 'no ':<4}{name:<22} {status.reason}")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    lines.append(f'attention = "auto" on {device_type} would take:')
    dtypes = (torch.bfloat16, torch.float32) if device_type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        for kind, features in _LAYER_KINDS.items():
            request = AttentionRequest(
                device_type=device_type, dtype=dtype, head_dim=128, v_head_dim=128, features=features
            )
            choice = resolve_impl(request)
            dtype_name = str(dtype).removeprefix("torch.")
            lines.append(f"  {kind} layers, {dtype_name}: {choice.impl} ({choice.provider}): {choice.reason}")
    return lines
