"""Attached models run forests and nothing else, until asked for their own attention."""

# Shape letters: T rows, H heads, D head dim.

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import ALL_FAMILIES, EXTRAS, VOCAB_SIZE, build_model
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ratoon.layout import pack_groups
from ratoon.models import Forest, attach, attention_choices, forward_logprobs, interface, stock_attention
from ratoon.models.self_check import check_against_stock
from ratoon.types import Prompt, Response, RolloutGroup, UserError

torch.set_num_threads(1)


def make_groups() -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    prompt = Prompt("p", rng.integers(3, VOCAB_SIZE, 5))
    return [RolloutGroup(prompt, tuple(Response(rng.integers(3, VOCAB_SIZE, length)) for length in (3, 2, 4)))]


@pytest.fixture
def model() -> Any:
    return attach(build_model("llama", dtype=torch.float32))


@pytest.fixture
def forest() -> Forest:
    return Forest.build(pack_groups(make_groups()), device="cpu")


@pytest.mark.parametrize("name", sorted(ALL_FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_passes_the_check(name: str, dtype: torch.dtype):
    attach(build_model(name, dtype=dtype))


def test_whole_model_gives_logits_of_a_forest(model: Any, forest: Forest):
    logits_TV = model(input_ids=forest.token_ids_1T, forest=forest).logits[0]
    predictor_row_M = torch.tensor(forest.layout.predictor_row_M.astype(np.int64))
    target_M = torch.tensor(forest.layout.target_M)
    expected_M = logits_TV[predictor_row_M].log_softmax(-1).gather(1, target_M[:, None])[:, 0]
    logprobs_M, _ = forward_logprobs(model, forest.layout)
    torch.testing.assert_close(logprobs_M, expected_M, rtol=0, atol=1e-5)


def test_a_call_without_a_forest_is_refused(model: Any):
    """AReaL#1442: packed input on stock attention gave wrong log-probs without an error."""
    with pytest.raises(
        ValueError, match=r"needs forest=Forest\(\.\.\.\), got NoneType.*stock_attention\(model, 'sdpa'\)"
    ):
        model(input_ids=torch.tensor([[3, 4, 5]]))
    with pytest.raises(ValueError, match="got dict"):
        model(input_ids=torch.tensor([[3, 4, 5]]), forest={"cu_seqlens": [0, 3]})


@pytest.mark.parametrize("shape", [(1, 14), (1, 1, 14, 14)])
def test_masks_are_refused(model: Any, forest: Forest, shape: tuple[int, ...]):
    """transformers#46634: an all-ones mask switches packing off without a word. verl#6345, verl#6278: a mask rebuilt
    from the responses' alone."""
    with pytest.raises(ValueError, match=r"attention_mask of shape .* leave the mask out"):
        model(input_ids=forest.token_ids_1T, forest=forest, attention_mask=torch.ones(shape))


def test_masks_that_reach_the_interfaces_are_refused():
    mask_function = ALL_MASK_ATTENTION_FUNCTIONS[interface.IMPLEMENTATION]
    assert mask_function(batch_size=1, q_length=3, attention_mask=None) is None
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        mask_function(batch_size=1, q_length=3, attention_mask=torch.ones(1, 3))


def test_positions_of_several_axes_are_refused(model: Any, forest: Forest):
    """transformers#44911, transformers#47342: three-dimensional position ids were taken for packing."""
    with pytest.raises(ValueError, match=r"got \[3, 1, 14\]; positions of several axes \(MRoPE\) are not supported"):
        model(input_ids=forest.token_ids_1T, forest=forest, position_ids=forest.positions_1T.expand(3, 1, -1))


def test_positions_are_the_forest_s(model: Any, forest: Forest):
    given = model(input_ids=forest.token_ids_1T, forest=forest, position_ids=forest.positions_1T.clone()).logits
    assert torch.equal(given, model(input_ids=forest.token_ids_1T, forest=forest).logits)
    with pytest.raises(ValueError, match="differ from the forest's"):
        model(input_ids=forest.token_ids_1T, forest=forest, position_ids=torch.arange(14)[None])


def test_other_misuses_are_refused(model: Any, forest: Forest):
    """axolotl#1375: a batch of more than one row lost its boundaries."""
    with pytest.raises(ValueError, match=r"input_ids must be the forest's, \[1, 14\], got \[2, 14\]"):
        model(input_ids=forest.token_ids_1T.expand(2, -1), forest=forest)
    with pytest.raises(ValueError, match="keeps no cache"):
        model(input_ids=forest.token_ids_1T, forest=forest, use_cache=True)
    with pytest.raises(ValueError, match="not attached"):
        forward_logprobs(build_model("llama"), forest.layout)
    with pytest.raises(UserError, match="takes a transformers model, got Linear"):
        attach(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="impl must be one of"):
        attach(model, "fastest")


def test_keywords_that_attention_does_not_know_are_refused(forest: Forest):
    tensor = torch.zeros(1, 2, 14, 8)
    with pytest.raises(ValueError, match="Identity hands its attention position_bias"):
        interface.attend_forest(nn.Identity(), tensor, tensor, tensor, forest=forest, position_bias=tensor)
    with pytest.raises(ValueError, match=r"dropout is 0\.1"):
        interface.attend_forest(nn.Identity(), tensor, tensor, tensor, forest=forest, dropout=0.1)


def test_a_refused_implementation_leaves_the_attachment_as_it_was(model: Any, forest: Forest):
    before, _ = forward_logprobs(model, forest.layout)
    with pytest.raises(ValueError, match="flex"):
        attach(model, "flex")
    after, _ = forward_logprobs(model, forest.layout)
    assert torch.equal(before, after)


def test_attaching_again_changes_the_implementation(model: Any, forest: Forest):
    for impl in ("reference", "flash"):
        attach(model, impl)
        (line,) = attention_choices(model)
        assert line.startswith(f"forward {impl}") and "(2 layers, head dim 8, global): " in line
        forward_logprobs(model, forest.layout)
    assert len(model.base_model._forward_pre_hooks) == 1


def test_choices_are_told_for_each_kind_of_layer():
    first, second = attention_choices(attach(build_model("gpt_oss")))
    assert first.startswith("forward reference, backward reference (2 layers, head dim 8, window 4): ")
    assert "flash-cpu has no sliding window" in first
    assert second.startswith("forward flash-cpu, backward flash-cpu (1 layer, head dim 8, global): ")


def test_stock_attention_generates_and_returns(model: Any, forest: Forest):
    plain: Any = build_model("llama", dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
    before, _ = forward_logprobs(model, forest.layout)
    for implementation in ("sdpa", "eager"):
        with stock_attention(model, implementation):
            assert model.config._attn_implementation == implementation
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
            with pytest.raises(ValueError, match="would let responses read one another"):
                forward_logprobs(model, forest.layout)
    after, _ = forward_logprobs(model, forest.layout)
    assert torch.equal(before, after)


def test_stock_attention_returns_after_an_error(model: Any, forest: Forest):
    with pytest.raises(RuntimeError, match="in generation"), stock_attention(model, "sdpa"):
        raise RuntimeError("in generation")
    forward_logprobs(model, forest.layout)
    with pytest.raises(ValueError, match="no_such"), stock_attention(model, "no_such"):
        pass
    forward_logprobs(model, forest.layout)
    with pytest.raises(ValueError, match="name of a transformers attention"), stock_attention(model, "ratoon"):
        pass


def test_a_copy_is_attached_and_has_its_own_weights(model: Any, forest: Forest):
    twin = copy.deepcopy(model)
    before, _ = forward_logprobs(twin, forest.layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after, _ = forward_logprobs(twin, forest.layout)
    assert torch.equal(before, after)
    with stock_attention(model, "sdpa"):
        forward_logprobs(twin, forest.layout)


def test_the_check_leaves_modes_and_gradients_as_they_were():
    model: Any = build_model("llama").train()
    model.base_model.layers[0].eval()
    attach(model)
    assert model.training and not model.base_model.layers[0].training and model.base_model.layers[1].training
    assert all(parameter.grad is None for parameter in model.parameters())


def leak(kind: str) -> Any:
    """Our attention function with a mistake in it."""
    honest = interface.forest_attention

    def wrong(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Any, **keywords: Any) -> Tensor:
        match kind:
            case "responses read one another":
                keywords.pop("impl")
                expiry_T = torch.full_like(plan.expiry_T, plan.num_rows)
                mask_TT = torch.ones(plan.num_rows, plan.num_rows).tril().bool() & (expiry_T[None] > 0)
                scores = torch.einsum("qhd,khd->hqk", q_THD, k_THD.repeat_interleave(2, 1)) * keywords["softmax_scale"]
                probs = scores.masked_fill(~mask_TT, -torch.inf).softmax(-1)
                return torch.einsum("hqk,khd->qhd", probs, v_THD.repeat_interleave(2, 1))
            case "responses lose a part of the prompt":
                out_THD = honest(q_THD, k_THD, v_THD, plan, **keywords)
                return torch.cat([out_THD[:-5], v_THD[-5:].repeat_interleave(2, 1)])
            case "a trace of the last row":
                return honest(q_THD, k_THD, v_THD, plan, **keywords) + 1e-3 * q_THD[-1]
            case _:
                raise AssertionError(kind)

    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["responses read one another", "responses lose a part of the prompt"])
def test_the_check_catches_wrong_attention(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype):
    """zoo#1019: a check that passes 0.7 nats and swallows its errors finds nothing."""
    monkeypatch.setattr(interface, "forest_attention", leak(kind))
    model = build_model("llama", dtype=dtype)
    with pytest.raises(UserError, match="failed the check at attach time"):
        attach(model)
    # Not attached: as it was before.
    assert model.config._attn_implementation == "sdpa"
    assert not model.base_model._forward_pre_hooks
    model(input_ids=torch.tensor([[3, 4, 5]]))


def test_the_check_catches_a_leak_below_rounding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interface, "forest_attention", leak("a trace of the last row"))
    with pytest.raises(UserError, match="changing one response moved another's log-probs"):
        attach(build_model("llama", dtype=torch.bfloat16))


def test_the_check_catches_a_scaled_head():
    model: Any = build_model("llama", dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits * 1.01)
    with pytest.raises(UserError, match="failed the check"):
        attach(model)


def test_the_check_does_not_swallow_errors(monkeypatch: pytest.MonkeyPatch):
    """zoo#1019."""

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("kernel exploded")

    monkeypatch.setattr(interface, "forest_attention", broken)
    with pytest.raises(RuntimeError, match="kernel exploded"):
        attach(build_model("llama"))


def test_a_window_that_the_layers_are_not_given_is_found():
    model = build_model("llama", dtype=torch.float32)
    model.config.sliding_window = 4_096
    with pytest.raises(UserError, match=r"the windows \(None, None\), its configuration says \(4096, 4096\)"):
        attach(model)


def test_a_layer_that_does_not_attend_is_found():
    model: Any = build_model("llama", dtype=torch.float32)
    model.base_model.layers[1].self_attn = _Nothing()
    with pytest.raises(UserError, match="called its attention 1 times for 2 layers"):
        attach(model)


class _Nothing(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def test_attached_models_pass_the_check_again(model: Any):
    assert len(check_against_stock(model)) == 2


def test_an_unlisted_family_is_accepted_by_the_check():
    assert "gpt_neox" not in EXTRAS
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB_SIZE}
    config = GPTNeoXConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    attach(GPTNeoXForCausalLM(config))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_families_on_a_gpu(name: str):
    """bf16 and the kernels of the machine; the check at attach time compares and looks for leaks."""
    model = attach(build_model(name, dtype=torch.bfloat16).to("cuda"))  # pyright: ignore[reportArgumentType]
    logprobs_M, _ = forward_logprobs(model, pack_groups(make_groups()))
    assert logprobs_M.device.type == "cuda"
    logprobs_M.sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_an_attached_model_is_unpickled_in_another_process(model: Any, forest: Forest, tmp_path: Path):
    expected_M, _ = forward_logprobs(model, forest.layout)
    torch.save((model, forest.layout, expected_M.detach()), tmp_path / "attached.pt")
    code = (
        f"import sys; sys.path[:] = {sys.path}; import torch; torch.set_num_threads(1)\n"
        f"model, layout, expected_M = torch.load({str(tmp_path / 'attached.pt')!r}, weights_only=False)\n"
        "from ratoon.models import forward_logprobs\n"
        "assert torch.equal(forward_logprobs(model, layout)[0], expected_M)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_weights_are_named(value: float):
    model = build_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = value
    with pytest.raises(UserError, match=r"NaN or infinite, in 1 of its tensors, first model.layers.1.mlp.up_proj"):
        attach(model)


def test_a_model_that_overflows_is_not_said_to_have_a_wrong_layout():
    model = build_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(6e4)
    with pytest.raises(UserError, match=r"finite weights, and log-probs that are not, .* overflows in torch.float16"):
        attach(model)


def test_attention_that_alone_gives_nan_is_a_wrong_layout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interface, "forest_attention", lambda q_THD, k_THD, v_THD, *_, **__: q_THD * float("nan"))
    with pytest.raises(UserError, match=r"failed the check at attach time: .* its log-probs on a small forest are not"):
        attach(build_model("llama", dtype=torch.float32))
