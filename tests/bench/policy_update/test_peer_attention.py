"""Peers compiled: one graph a layer as ours, with the results of the layers as they are."""

from typing import Any

import pytest
import torch
from tests.bench.attention.inputs import varlen_stand_in
from tests.bench.policy_update.stand_ins import peer_kernel
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from ratoon.bench.attention.peers import Copies
from ratoon.bench.policy_update import microbatches
from ratoon.bench.policy_update.cases import CASES, make_group
from ratoon.bench.policy_update.microbatches import VarlenPack, attending, pack_update
from ratoon.bench.policy_update.peer_attention import PeerAttention, Runs
from ratoon.bench.policy_update.random_model import build_model
from ratoon.bench.policy_update.variants import Variant
from ratoon.models import set_compile, set_recompute

CPU = torch.device("cpu")
TINY = CASES["tiny"].decoder

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def peers_on_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbatches, "load_kernel", lambda *_: peer_kernel(varlen_stand_in))


def update(model: PreTrainedModel, variant: Variant, P: int, lengths: list[int]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    groups = [make_group(TINY.vocab_size, P, lengths, seed) for seed in (1, 2)]
    with attending(model, variant):
        for microbatch in pack_update(groups, variant, 2, CPU):
            microbatch.backward(model)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.full
@pytest.mark.parametrize("impl", ["fa4", "kv-copy-fa4"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_compiled_layer_of_a_peer_is_one_graph(impl: str, recompute: str):
    """A break at attention cost ours 10 ms of 418: peers must not pay what we do not. Lengths compile nothing anew."""
    variant = Variant.named(f"{impl}/{recompute}/layers")
    model = set_recompute(build_model(TINY, CPU), variant.recompute)
    updates = [(23, [5, 9, 1]), (7, [40, 3, 11])]
    wanted = [update(model, variant, *shape) for shape in updates]
    set_compile(model, "layers", backend="aot_eager")
    for shape, gradients in zip(updates, wanted, strict=True):
        got = update(model, variant, *shape)
        assert got.keys() == gradients.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.full
@pytest.mark.parametrize("impl", ["auto", "fa4"])
def test_layers_with_adapters_are_compiled_whole(impl: str):
    """Two graphs: nothing before the first layer learns, so that its input has no gradient."""
    variant = Variant.named(f"{impl}/none/layers")
    model = build_model(TINY, CPU, lora_rank=4)
    wanted = update(model, variant, 23, [5, 9, 1])
    assert all("lora" in name and gradient.any() for name, gradient in wanted.items())
    set_compile(model, "layers", backend="aot_eager")
    for name, gradient in update(model, variant, 23, [5, 9, 1]).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    update(model, variant, 7, [40, 3, 11])
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def make_attention(has_copies: bool) -> PeerAttention:
    """Two runs; the second reads the first's keys before its own."""
    rows = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]) if has_copies else torch.arange(5)
    lengths_k = [0, 3, 8] if has_copies else [0, 3, 5]
    runs = Runs(
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_k=torch.tensor(lengths_k, dtype=torch.int32),
        max_seqlen_q=3,
        max_seqlen_k=5 if has_copies else 3,
    )
    copies = Copies.of(rows.numpy(), 5, CPU) if has_copies else None
    return PeerAttention(kernel=peer_kernel(varlen_stand_in), runs=runs, key_copies=copies)


def test_the_compiler_is_told_the_truth():
    attention = make_attention(has_copies=False)
    q, k, v = (torch.randn(H, 5, 8, dtype=torch.float64).transpose(0, 1).requires_grad_() for H in (4, 2, 2))
    tests: Any = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops: Any = torch.ops.ratoon_bench
    torch.library.opcheck(ops.attend_runs.default, (q, k, v, attention.number, 0.3), test_utils=tests)
    attention = make_attention(has_copies=True)
    assert attention.key_copies is not None
    torch.library.opcheck(ops.copy_rows.default, (k, attention.key_copies.row_U, attention.number), test_utils=tests)


@pytest.mark.parametrize("has_copies", [False, True])
def test_in_a_graph_and_outside_it_is_the_same_attention(has_copies: bool):
    """Strided queries too, which only a graph hands on as they are."""
    attention = make_attention(has_copies)

    def answer(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(H, 5, 8, dtype=torch.float64).requires_grad_() for H in (4, 2, 2)]
        out_THD = call(*(x.transpose(0, 1) for x in leaves), 0.3)
        return [out_THD.detach(), *torch.autograd.grad(out_THD.square().sum(), leaves)]

    compiled = torch.compile(attention.__call__, backend="aot_eager", fullgraph=True, dynamic=True)
    for got, wanted in zip(answer(compiled), answer(attention), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_attention_that_is_gone_is_named():
    number = make_attention(has_copies=False).number
    x = torch.zeros(5, 2, 8)
    with pytest.raises(AssertionError, match="is gone"):
        torch.ops.ratoon_bench.attend_runs(x, x, x, number, 1.0)


def test_a_pack_holds_its_attention():
    (microbatch,) = pack_update([make_group(TINY.vocab_size, 5, [3], 0)], Variant.named("fa4/none/layers"), 2, CPU)
    assert isinstance(microbatch.pack, VarlenPack)
    x = torch.zeros(8, 2, 8)
    assert torch.ops.ratoon_bench.attend_runs(x, x, x, microbatch.pack.attention.number, 1.0)[0].shape == x.shape
