"""What torch.compile makes of layers with experts, whose rows per expert only the router knows."""

import pytest
import torch
from tests.bench.policy_update.test_check import wide_init
from torch import Tensor
from torch._dynamo.utils import counters

from ratoon.bench.policy_update.cases import CASES, make_group
from ratoon.layout import pack_groups
from ratoon.models import forward_logprobs, set_compile, set_recompute

EXPERTS = CASES["tiny-experts"].decoder

torch.set_num_threads(1)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_in_bfloat16_they_are_one_graph_for_all_lengths(recompute: str):
    """In float32 they are not: there transformers multiplies in groups by an op that reads the groups on the host."""
    torch._dynamo.reset()
    counters.clear()
    model = wide_init(EXPERTS)
    set_recompute(model, recompute)  # type: ignore[arg-type]

    def gradients(P: int, lengths: list[int]) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        forward_logprobs(model, pack_groups([make_group(EXPERTS.vocab_size, P, lengths, 3)]))[0].sum().backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}

    shapes = [(23, [5, 9, 1]), (7, [40, 3, 11]), (61, [2, 2, 30]), (12, [8])]
    wanted = [gradients(*shape) for shape in shapes]
    assert any("experts" in name for name in wanted[0])
    set_compile(model, "layers", backend="aot_eager")
    for shape, of_shape in zip(shapes, wanted, strict=True):
        for name, gradient in gradients(*shape).items():
            assert (gradient.float() - of_shape[name].float()).norm() <= 0.01 * of_shape[name].float().norm(), name
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()
