"""Levels are joined without a trace of what their kernels left in rows that they did not compute."""

# Shape letters: T rows, H heads, E value head dim.

import os
import subprocess
import sys

import pytest
import torch
from tests.attention.flash.merge_case import EXPECTED_ERROR, make_merge_case

from ratoon.attention.flash.merge import add_level, add_sinks, merge_level


def test_merge_is_attention_over_both_parts():
    generator = torch.Generator().manual_seed(0)
    scores_HTK = 3 * torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    values_HKE = torch.randn(2, 9, 4, generator=generator, dtype=torch.float64)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part_HTK = scores_HTK[..., keys]
        return (part_HTK.softmax(dim=-1) @ values_HKE[:, keys]).transpose(0, 1), part_HTK.logsumexp(dim=-1)

    out_THE, lse_HT = attend(slice(0, 3))
    out_THE = out_THE.contiguous()
    merge_level(out_THE, lse_HT, *attend(slice(3, 9)), torch.ones(5, dtype=torch.bool))
    wanted_THE, wanted_HT = attend(slice(0, 9))
    assert (out_THE - wanted_THE).abs().max() < 1e-14 and (lse_HT - wanted_HT).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_that_are_not_marked_keep_every_bit(dtype: torch.dtype):
    case = make_merge_case(dtype)
    out_THE, lse_HT, total_THE = case.out_THE.clone(), case.lse_HT.clone(), case.out_THE.clone()
    merge_level(out_THE, lse_HT, case.part_THE, case.part_lse_HT, case.marked_T)
    add_level(total_THE, case.part_THE, case.marked_T)
    kept = ~case.marked_T
    assert torch.equal(out_THE[kept], case.out_THE[kept]) and torch.equal(lse_HT[:, kept], case.lse_HT[:, kept])
    assert torch.equal(total_THE[kept], case.out_THE[kept])
    assert out_THE.isfinite().all() and lse_HT.isfinite().all() and total_THE.isfinite().all()
    assert not torch.equal(out_THE, case.out_THE)


def test_a_sink_is_a_key_without_value():
    out_THE, lse_HT = torch.ones(3, 2, 4).double(), torch.tensor([[0.0] * 3, [1.0] * 3]).double()
    got_THE, got_HT = add_sinks(out_THE, lse_HT, torch.tensor([0.0, -torch.inf]))
    assert torch.allclose(got_THE[:, 0], torch.tensor(0.5).double()) and torch.equal(got_THE[:, 1], out_THE[:, 1])
    assert torch.allclose(got_HT[0], torch.tensor(2.0).double().log()) and torch.equal(got_HT[1], lse_HT[1])


def test_kernels_agree_with_their_eager_twins():
    """Under Triton's interpreter, which must be chosen before Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.attention.flash.merge_case"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    errors = [float(line) for line in result.stdout.split()]
    assert len(errors) == 6 and max(errors) <= EXPECTED_ERROR, f"kernels are off by {errors}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_agree_with_their_eager_twins_on_a_gpu(dtype: torch.dtype):
    from tests.attention.flash.merge_case import errors_of_kernels

    assert max(errors_of_kernels(dtype, "cuda")) <= (1e-6 if dtype == torch.float32 else 1e-2)
