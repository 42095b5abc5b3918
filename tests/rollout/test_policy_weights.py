"""What engines with weights of their own are sent: adapters merged, parts gathered, one weight at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from tests.rollout.tiny import tiny_qwen3
from torch import nn
from transformers import PreTrainedModel

from ratoon.distributed import DataParallel
from ratoon.models import LoraConfig, add_adapters
from ratoon.models.quantised import QuantisedLinear
from ratoon.models.sharding import shard_policy
from ratoon.rollout.policy_weights import policy_stream
from ratoon.types import UserError
from ratoon.weight_sync import iter_buckets


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Every weight that trains is others than at first."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_adapters_are_merged_into_weights_of_the_base():
    """A model that loads the stream computes what the adapted one does, and knows no adapters."""
    model = moved(add_adapters(tiny_qwen3().eval(), LoraConfig(rank=4, alpha=8), seed=0), seed=1)
    stream = policy_stream(model, torch.float32)
    assert not any("lora" in name or "base_layer" in name for name in stream)
    plain = tiny_qwen3(seed=5).eval()
    plain.load_state_dict(dict(stream.items()))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        base = tiny_qwen3().eval()(ids).logits
        adapted, merged = model.eval()(ids).logits, plain(ids).logits
    assert (adapted - base).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)


def test_merging_again_does_not_add_the_adapters_twice():
    """verl#7904: output was garbled from the second sync on, where adapters were merged and the base not restored."""
    model = moved(add_adapters(tiny_qwen3(), LoraConfig(rank=4, alpha=8), seed=0), seed=1)
    first = {name: value.clone() for name, value in policy_stream(model, torch.float32).items()}
    for name, value in policy_stream(model, torch.float32).items():
        assert torch.equal(value, first[name]), name


def test_weights_in_codes_are_refused():
    model = tiny_qwen3()
    with torch.device("meta"):
        coded = nn.Linear(4, 4)
    coded.__class__ = QuantisedLinear
    model.set_submodule("model.layers.0.mlp.down_proj", coded)
    with pytest.raises(UserError, match=r"model\.quantization keeps the base in codes"):
        policy_stream(model, torch.float32)


def gather(ranks: DataParallel, folder: Path) -> dict[str, Any]:
    model = shard_policy(moved(tiny_qwen3(), seed=3))
    stream = policy_stream(model, torch.bfloat16)
    buckets = list(iter_buckets(stream.items(), 4_096))
    return {"weights": dict(pair for bucket in buckets for pair in bucket), "num_buckets": len(buckets)}


def test_parts_on_two_ranks_are_sent_as_one_model(tmp_path: Path):
    whole = moved(tiny_qwen3(), seed=3)
    for found in run_on_ranks(2, gather, tmp_path):
        assert found["num_buckets"] > 4
        assert set(found["weights"]) == {name for name, _ in whole.named_parameters()}
        for name, parameter in whole.named_parameters():
            assert torch.equal(found["weights"][name], parameter.detach().bfloat16()), name
