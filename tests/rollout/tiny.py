"""A tiny model and a byte-level tokenizer."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ratoon.rollout.engine import RolloutEngine
from ratoon.types import Prompt, RolloutGroup, SamplingParams

NUM_BYTES = 256
EOS = NUM_BYTES
VOCAB = NUM_BYTES + 2


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, "<eos>" and "<pad>"; the letters of a text are its bytes."""
    # The byte-level alphabet writes each byte as one printable character.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)} | {"<eos>": EOS, "<pad>": EOS + 1}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        attention_dropout=0.3,
        eos_token_id=EOS,
        pad_token_id=EOS + 1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_prompts(lengths: Sequence[int], seed: int = 1) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(f"p{index}", rng.integers(0, NUM_BYTES, length)) for index, length in enumerate(lengths)]


def draw(
    engine: RolloutEngine, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, step: int = 0
) -> list[RolloutGroup]:
    """Generate for all prompts at once."""

    async def run() -> list[RolloutGroup]:
        calls = [engine.generate(p, group_size=group_size, sampling=sampling, step=step) for p in prompts]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def assert_same_group(left: RolloutGroup, right: RolloutGroup, atol: float = 1e-5) -> None:
    """The same tokens, ends and texts, and log-probs equal to rounding."""
    assert left.group_size == right.group_size
    for a, b in zip(left.responses, right.responses, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.finish_reason, a.text) == (b.finish_reason, b.text)
        assert a.rollout_logprobs is not None and b.rollout_logprobs is not None
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=atol)
