"""The model and tokenizer made on the spot."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratoon.models import FreshModelConfig, attach, build_fresh, load_policy, load_tokenizer, model_shape

SMALL = FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)


def test_weights_follow_the_seed_and_leave_the_global_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = build_fresh(SMALL, seed=1)
    torch.manual_seed(6)
    second, _ = build_fresh(SMALL, seed=1)
    other, _ = build_fresh(SMALL, seed=2)
    torch.manual_seed(5)
    build_fresh(SMALL, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    for one, same, different in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert one.ndim == 1 or not torch.equal(one, different)


def test_a_token_is_a_character():
    _, tokenizer = build_fresh(SMALL, seed=0)
    text = "1 + 2\n = 3?"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("aéa☃")["input_ids"] == [
        *tokenizer("a")["input_ids"],
        tokenizer.unk_token_id,
        *tokenizer("a")["input_ids"],
        tokenizer.unk_token_id,
    ]


def test_special_tokens_are_distinct():
    model, tokenizer = build_fresh(SMALL, seed=0)
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    assert None not in special
    assert len(set(special)) == 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model_shape(model.config).vocab_size == len(tokenizer)


def test_saved_folder_loads_as_any_other(tmp_path: Path):
    model, tokenizer = build_fresh(SMALL, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("7 * 8 = 56")["input_ids"]
    for loaded in (plain, load_tokenizer(tmp_path)):
        assert loaded("7 * 8 = 56")["input_ids"] == ids
        assert loaded.decode([*ids, model.config.eos_token_id], skip_special_tokens=True) == "7 * 8 = 56"
        assert (loaded.eos_token, loaded.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    expected = model(input_ids=torch.tensor([ids])).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=torch.tensor([ids])).logits, expected)
    for name, parameter in load_policy(tmp_path).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_default_is_accepted_by_attach():
    model, _ = build_fresh(FreshModelConfig(), seed=0)
    attach(model)
