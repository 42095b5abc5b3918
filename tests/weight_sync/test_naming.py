"""What leaves for an engine has a checkpoint's names, whatever the model in memory calls it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.rollout.tiny import tiny_qwen3
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ratoon.types import UserError
from ratoon.weight_sync import CheckpointNames, WeightStream, WeightSyncError, check_same_names, naming

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=16, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(config)


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def tied_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


MODELS = [qwen3_moe, mixtral, tied_llama, tiny_qwen3]


def stream_of(model: PreTrainedModel) -> WeightStream:
    parameters = dict(model.named_parameters())
    return WeightStream(CheckpointNames.of(model), lambda name: parameters[name].detach())


@pytest.mark.parametrize("make", MODELS)
def test_the_stream_is_what_a_checkpoint_holds(make: Callable[[], PreTrainedModel], tmp_path: Path):
    """SkyRL#1680, SkyRL#1737: weights of experts, sent in several pieces, were silently wrong. Names, shapes and values
    of every tensor are those of a written checkpoint, which is what engines are made to load."""
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    stream = stream_of(model)
    assert {name: tensor.shape for name, tensor in written.items()} == dict(stream.shapes)
    sent = [(name, tensor.clone()) for name, tensor in stream.items()]
    assert [name for name, _ in sent] == list(stream) and len(sent) == len(stream)
    for name, tensor in sent:
        assert torch.equal(tensor, written[name]), name


def test_a_loaded_model_sends_the_names_it_was_loaded_by(tmp_path: Path):
    qwen3_moe().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(stream_of(model)) == set(load_file(tmp_path / "model.safetensors"))


def test_tied_weights_are_sent_once():
    stream = stream_of(tied_llama())
    assert "lm_head.weight" not in stream and "model.embed_tokens.weight" in stream


def test_one_parameter_at_a_time_is_made():
    """Three experts of one fused tensor need it gathered once, and it is gone when the next parameter is."""
    model = qwen3_moe()
    parameters = dict(model.named_parameters())
    made: list[str] = []

    def value(name: str) -> Tensor:
        made.append(name)
        return parameters[name].detach()

    stream = WeightStream(CheckpointNames.of(model), value)
    assert not made, "names are known without a weight"
    for _ in stream.items():
        pass
    assert made == list(parameters)


def test_no_weight_is_read_for_the_names():
    with torch.device("meta"):
        model = qwen3_moe()
    assert len(CheckpointNames.of(model).shapes) > len(list(model.parameters()))


def test_adapted_parameters_are_named_as_their_base():
    model = tiny_qwen3()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.model.layers[0].self_attn.q_proj = nn.Sequential(model.model.layers[0].self_attn.q_proj)  # type: ignore[assignment]
    assert set(CheckpointNames.of(model, shapes).shapes) == set(shapes)


def test_parameters_that_join_in_a_checkpoint_are_refused(monkeypatch: pytest.MonkeyPatch):
    def join(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"joined": torch.cat([tensor.flatten() for tensor in state.values()])}

    monkeypatch.setattr(naming, "revert_weight_conversion", join)
    with pytest.raises(UserError, match=r"checkpoint of Qwen3ForCausalLM joins several .* \(joined\)"):
        CheckpointNames.of(tiny_qwen3())


def test_names_that_one_side_lacks_are_an_error():
    check_same_names(["a", "b"], ["b", "a"], giver="version 3", taker="vLLM")
    with pytest.raises(
        WeightSyncError, match=r"version 3: vLLM was not given a, b, c and 1 more; vLLM does not know z"
    ):
        check_same_names("abcd", "z", giver="version 3", taker="vLLM")


def test_the_stream_keeps_only_the_parameter_read_last():
    """A bucket holds at most its own tensors and one parameter more."""
    import weakref

    model = qwen3_moe()
    alive: list[weakref.ref[Tensor]] = []

    def value(name: str) -> Tensor:
        copy = model.get_parameter(name).detach().clone()
        alive.append(weakref.ref(copy.untyped_storage()))  # type: ignore[arg-type]
        return copy

    def read() -> Iterator[int]:
        stream = WeightStream(CheckpointNames.of(model), value)
        for name in stream:
            stream[name]
            yield sum(ref() is not None for ref in alive)

    assert max(read()) <= 2
