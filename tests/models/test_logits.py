"""Logits of single rows against the model's own forward pass."""

import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model

from ratoon.models import attach, stock_attention
from ratoon.models.logits import float32_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere", "granite"])
def test_heads_scale_and_cap_as_the_model_does(name: str, dtype: torch.dtype, device: str):
    model = attach(build_model(name, dtype=torch.float32))
    model.to(device=torch.device(device), dtype=dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    token_ids = torch.randint(0, VOCAB_SIZE, (1, 9), device=device)
    with stock_attention(model, "eager"), torch.no_grad():
        output = model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        got = float32_logits(model, output.hidden_states[-1][0])
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        digits = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, output.logits[0].to(got.dtype), rtol=digits, atol=digits)
        assert float32_logits(model, output.hidden_states[-1][0, :0]).shape == (0, VOCAB_SIZE)
