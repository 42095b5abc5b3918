"""Every variant computes the same update, and one with another mask is found, in bf16 too."""

from collections.abc import Callable

import pytest
import torch
from tests.bench.attention.inputs import varlen_stand_in
from tests.bench.policy_update.stand_ins import WRONG, peer_kernel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratoon.bench.outcome import CannotRunError, WrongResultError
from ratoon.bench.policy_update import microbatches
from ratoon.bench.policy_update.cases import CASES, Decoder, make_group
from ratoon.bench.policy_update.check import (
    SLICE_SEQUENCES,
    Slice,
    check_full_size,
    run_update,
)
from ratoon.bench.policy_update.microbatches import attending, pack_update
from ratoon.bench.policy_update.random_model import build_model, decoder_config
from ratoon.bench.policy_update.variants import PEERS_TODAY, Variant
from ratoon.models import attach, set_recompute

CPU = torch.device("cpu")
DEEP = Decoder(
    name="deep", hidden_size=64, intermediate_size=192, num_layers=28, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=509,
)  # fmt: skip
VARIANTS = ("auto/none/none", "auto/full/none", "fa2/none/none", "fa4/selective/none", "kv-copy-fa4/full/none")

torch.set_num_threads(1)


@pytest.fixture(params=["float32", "bfloat16", "experts, float32", "experts, bfloat16", "adapters"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "adapters":
        return build_model(CASES["tiny-lora"].decoder, CPU, lora_rank=4)
    decoder = CASES["tiny-experts" if "experts" in request.param else "tiny"].decoder
    return build_model(decoder, CPU) if "float32" in request.param else wide_init(decoder)


def wide_init(decoder: Decoder) -> PreTrainedModel:
    """bf16, with weights that give a narrow layer the activations of a layer of 2,048."""
    config = decoder_config(decoder)
    config.initializer_range = 0.02 * (2048 / decoder.hidden_size) ** 0.5  # pyright: ignore[reportAttributeAccessIssue]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attach(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())


def check(model: PreTrainedModel, of_model: Slice, name: str) -> dict[str, float]:
    variant = Variant.named(name)
    set_recompute(model, variant.recompute)
    with attending(model, variant):
        return of_model.check(model, pack_update(of_model.groups, variant, SLICE_SEQUENCES, CPU))


def use(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(microbatches, "load_kernel", lambda *_: peer_kernel(kernel))


def test_all_variants_compute_the_update(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, varlen_stand_in)
    of_model = Slice.of(model)
    for name in (*VARIANTS, PEERS_TODAY):
        gaps = check(model, of_model, name)
        assert set(gaps) == {"log-probs", "q_proj", "k_proj", "v_proj", "o_proj", "other weights"}
        assert model.config._attn_implementation == "ratoon", "what was set for a peer is set back"
        assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("wrong", WRONG)
def test_a_peer_with_another_mask_is_found(wrong: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    """Whatever rounding is allowed: the bounds of bf16, and of experts, are far inside what a wrong key does."""
    use(monkeypatch, WRONG[wrong])
    of_model = Slice.of(model)
    # Runs of queries and of keys differ in length only where keys are copied.
    name = "kv-copy-fa4/none/none" if wrong == "aligned at the first token" else "fa4/none/none"
    with pytest.raises(WrongResultError, match=r"on the slice, relative: .* out by \d.* \(allowed"):
        check(model, of_model, name)


def test_ours_is_held_to_the_same(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    from ratoon.models import interface

    right = interface.forest_attention
    of_model = Slice.of(model)
    monkeypatch.setattr(interface, "forest_attention", lambda *args, **kwargs: right(*args, **kwargs) * 2)
    with pytest.raises(WrongResultError, match="on the slice"):
        check(model, of_model, "auto/none/none")


def test_at_full_size_bf16_passes_and_a_leak_does_not(monkeypatch: pytest.MonkeyPatch):
    """28 layers of bf16 drift apart far less than the bound, which responses that read one another are far over."""
    model = wide_init(DEEP)
    groups = (make_group(DEEP.vocab_size, 190, [31] * 4, 0),)

    def update(name: str, kernel: Callable[..., Tensor]):
        use(monkeypatch, kernel)
        variant = Variant.named(name)
        with attending(model, variant):
            return run_update(model, pack_update(groups, variant, 2, CPU))

    ours = update("auto/none/none", varlen_stand_in)
    for name in ("fa4/none/none", "kv-copy-fa4/none/none"):
        assert 0.0 < check_full_size(update(name, varlen_stand_in), ours) < 0.12
    with pytest.raises(WrongResultError, match=r"at full size: .* of ours"):
        check_full_size(update("fa4/none/none", WRONG["no boundaries"]), ours)


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch):
    model = build_model(CASES["tiny"].decoder, CPU)
    use(monkeypatch, lambda *args: varlen_stand_in(*args) * torch.nan)
    with pytest.raises(WrongResultError, match="log-probs out by inf"):
        check(model, Slice.of(model), "fa4/none/none")


def test_peers_need_a_gpu():
    with pytest.raises(CannotRunError, match="needs a CUDA device"):
        pack_update(CASES["tiny"].groups, Variant.named("fa4/none/none"), 2, CPU)
