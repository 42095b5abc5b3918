"""A prompt computed once gives the log-probs and gradients of the group in one pass."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity.families import VOCAB_SIZE, build_model, gradients
from torch._dynamo import config as compiler_config
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from ratoon.layout import pack_groups
from ratoon.models import KeptPrompt, LoraConfig, add_adapters, attach, forward_logprobs, set_compile, set_recompute
from ratoon.types import Prompt, Response, RolloutGroup, SampledSupport

torch.set_num_threads(1)


def make_group(P: int, *lengths: int) -> RolloutGroup:
    rng = np.random.default_rng(P)
    return RolloutGroup(
        Prompt("p", rng.integers(3, VOCAB_SIZE, P)),
        tuple(Response(rng.integers(3, VOCAB_SIZE, R)) for R in lengths),
    )


def support_of(response: Response) -> SampledSupport:
    """Each token and the two after it in the vocabulary."""
    sets = [np.unique((token + np.arange(3)) % VOCAB_SIZE) for token in response.token_ids]
    return SampledSupport.of([ids.astype(np.int32) for ids in sets])


def weights_of(group: RolloutGroup) -> list[torch.Tensor]:
    """For each response, what its tokens' log-probs are weighted by in the loss."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.num_tokens, generator=generator, dtype=torch.float64) for r in group.responses]


def update_whole(model: PreTrainedModel, group: RolloutGroup) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logprobs_M, _ = forward_logprobs(model, pack_groups([group]), 0.7)
    (logprobs_M * torch.cat(weights_of(group))).sum().backward()
    return logprobs_M.detach(), gradients(model)


def update_kept(
    model: PreTrainedModel, group: RolloutGroup, cuts: list[list[int]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """cuts: the responses of each microbatch."""
    model.zero_grad()
    weights, found = weights_of(group), {}
    kept = KeptPrompt.keep(model, group.prompt.token_ids)
    for chosen in cuts:
        part = group.select(chosen)
        logprobs_M, _ = forward_logprobs(model, pack_groups([part]), 0.7, kept=kept)
        if logprobs_M.numel():
            (logprobs_M * torch.cat([weights[index] for index in chosen])).sum().backward()
        kept.add_gradients()
        lengths = [group.responses[index].num_tokens for index in chosen]
        found |= dict(zip(chosen, logprobs_M.detach().split(lengths), strict=True))
    kept.backward()
    return torch.cat([found[index] for index in range(group.group_size)]), gradients(model)


def assert_same(got: Any, wanted: Any, gap: float = 1e-9) -> None:
    """gap: 2-norm of each gradient's error, over its own and all gradients' average."""
    assert torch.allclose(got[0], wanted[0], rtol=0, atol=1e-10)
    assert got[1].keys() == wanted[1].keys()
    floor = sum(float(gradient.norm()) for gradient in wanted[1].values()) / len(wanted[1])
    for name, gradient in wanted[1].items():
        assert float((got[1][name] - gradient).norm()) <= gap * max(float(gradient.norm()), floor), name


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "gap"), [("qwen3", 1e-9), ("gemma2", 1e-6), ("gpt_oss", 1e-9), ("mixtral", 1e-9), ("cohere", 1e-6)]
)
def test_families(name: str, gap: float, mode: Any):
    """Windows that leave the prompt behind, softcaps, sinks, experts, a scaled head.

    Gemma's and Cohere's norms compute in float32, and so differ in any two ways of cutting: by 2e-7 with the prompt
    repeated.
    """
    model = set_recompute(attach(build_model(name)), mode)
    group = make_group(13, 6, 1, 9, 4)
    assert_same(update_kept(model, group, [[0, 3], [1], [2]]), update_whole(model, group), gap)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_lengths_and_cuts(P: int, lengths: list[int], random: Any):
    model = attach(build_model("qwen3"))
    group = make_group(P, *lengths)
    order = random.sample(range(len(lengths)), len(lengths))
    cut = random.randint(0, len(lengths))
    cuts = [sorted(part) for part in (order[:cut], order[cut:]) if part]
    if any(lengths):
        assert_same(update_kept(model, group, cuts), update_whole(model, group))


def test_adapters_and_frozen_weights():
    model = attach(build_model("qwen3"))
    add_adapters(model, LoraConfig(rank=2, alpha=4), seed=0)
    group = make_group(7, 5, 2, 3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, under which half of the gradients are zero
            torch.nn.init.normal_(parameter)
    assert_same(update_kept(model, group, [[0], [1, 2]]), update_whole(model, group))


@pytest.mark.full
def test_compiled():
    torch._dynamo.reset()
    model = attach(build_model("qwen3"))
    group = make_group(13, 6, 1, 9, 4)
    wanted = update_whole(model, group)
    set_compile(model, "layers", backend="aot_eager")
    assert_same(update_kept(model, group, [[0, 3], [1], [2]]), wanted)
    assert_same(update_whole(model, group), wanted)


@pytest.mark.full
def test_compiled_layers_of_two_windows_have_a_graph_for_every_pass():
    """Windows, gradients on and off, prompts and what goes on from them: beyond the compiler's limit it would only
    warn, and run what stands around the attention as it is."""
    torch._dynamo.reset()
    counters.clear()
    model = set_compile(attach(build_model("gemma2", dtype=torch.float32)), "layers", backend="aot_eager")

    def passes(group: RolloutGroup) -> int:
        with torch.no_grad():
            kept = KeptPrompt.keep(model, group.prompt.token_ids)
            forward_logprobs(model, pack_groups([group]), kept=kept)
            forward_logprobs(model, pack_groups([group]))
        update_kept(model, group, [[0], [1]])
        update_whole(model, group)
        return counters["stats"]["unique_graphs"]

    with compiler_config.patch(fail_on_recompile_limit_hit=True):
        num_graphs = passes(make_group(13, 6, 9))
        assert [passes(make_group(7, 5, 2)), passes(make_group(29, 11, 21))] == [num_graphs, num_graphs]


def test_without_gradients_and_with_supports():
    model = attach(build_model("qwen3"))
    group = make_group(5, 3, 2)
    supports = [support_of(response) for response in group.responses]
    with torch.no_grad():
        kept = KeptPrompt.keep(model, group.prompt.token_ids)
        for index, support in enumerate(supports):
            layout = pack_groups([group.select([index])])
            got, _ = forward_logprobs(model, layout, support=support, kept=kept)
            wanted, _ = forward_logprobs(model, layout, support=support)
            assert torch.allclose(got, wanted, rtol=0, atol=1e-10)
    kept.backward()  # nothing to do
    assert not gradients(model) or all(not g.any() for g in gradients(model).values())


def test_what_does_not_fit_is_refused():
    model = attach(build_model("qwen3"))
    group = make_group(5, 3, 2)
    kept = KeptPrompt.keep(model, group.prompt.token_ids)
    other = make_group(6, 3)
    for groups in ([other], [group, other]):
        with pytest.raises(ValueError, match="one group with the kept prompt of 5 tokens"):
            forward_logprobs(model, pack_groups(groups), kept=kept)
    with pytest.raises(ValueError, match="at least one token id"):
        KeptPrompt.keep(model, np.zeros(0, np.int64))
    for module in model.modules():
        vars(module).pop("layer_idx", None)
    with pytest.raises(ValueError, match="does not know the number of its layer"):
        KeptPrompt.keep(model, group.prompt.token_ids)
