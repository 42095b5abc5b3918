"""Truncated draws on CUDA are those on the CPU."""

import pytest
import torch

from ratoon.rollout.truncation import Truncation, sample_kept_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("filters", [(50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (500, 0.95, 0.001)])
def test_the_same_sets_and_draws_as_on_the_cpu(filters: tuple[int, float, float], is_rounded: bool):
    """Peaked and flat rows, equals everywhere where logits are rounded to bf16. Near a border a set may differ by the
    rounding of a sum; none does here."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(64, 20_011, generator=generator) * torch.tensor([0.3, 2.0, 6.0, 12.0]).repeat(16)[:, None]
    if is_rounded:
        logits_BV = logits_BV.bfloat16().float()
    uniform_B = torch.rand(64, generator=generator).double()
    truncation = Truncation(0.7, *filters)
    here = sample_kept_tokens(logits_BV, truncation, uniform_B)
    there = sample_kept_tokens(logits_BV.cuda(), truncation, uniform_B.cuda())
    assert torch.equal(there.token_B.cpu(), here.token_B)
    torch.testing.assert_close(there.logprob_B.cpu(), here.logprob_B, rtol=0, atol=1e-6)
    for one, other in zip(here.kept, there.kept, strict=True):
        assert one.tolist() == other.tolist()
