"""docs/attention.md names every implementation, and says of each what the registry says."""

from pathlib import Path

import pytest
import torch

from ratoon.attention import AttentionRequest, explain_choice
from ratoon.attention.specs import OF_BACKWARD, SPECS, ImplSpec

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def cells_of(name: str) -> list[str]:
    """The cells of the implementation's row, the name's included."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` | `")]
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_implementation_is_described(spec: ImplSpec):
    _, impl, provider, _, dtypes, window, softcap, sinks, deterministic, head_dims = cells_of(spec.name)
    assert (impl, provider) == (f"`{spec.impl}`", f"`{spec.provider}`")
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    assert {short[name] for name in dtypes.split(", ")} == {str(x).removeprefix("torch.") for x in spec.dtypes}
    both = spec.forward.features & (spec.backward.features | {"sinks"})
    assert (window == "yes", softcap == "yes", sinks == "yes") == (
        "sliding window" in both,
        "softcap" in both,
        "sinks" in both,
    )
    assert (deterministic != "no") == ("deterministic backward" in spec.backward.features & OF_BACKWARD)
    smallest, largest = spec.forward.min_head_dim, spec.forward.max_head_dim
    assert (smallest, largest) == (spec.backward.min_head_dim, spec.backward.max_head_dim)
    assert head_dims == ("any" if largest is None else f"to {largest}" if smallest == 1 else f"{smallest} to {largest}")


def test_the_example_of_a_run_log_is_what_a_cpu_logs():
    request = AttentionRequest(device_type="cpu", dtype=torch.float32, head_dim=32, v_head_dim=32)
    assert f"attention: {explain_choice(request, 'auto', '4 layers, head dim 32, global')}\n" in PAGE.read_text()
