"""What a run chooses to compute again, what it says where nothing fits, and what it measures."""

# Shape letters: P prompt tokens, R response tokens, N responses.

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loop.tiny_run import TinyRun
from tests.rollout.paged.fake import FakeRunner

from ratoon.config import load_recipe
from ratoon.config.recipe import Recipe
from ratoon.layout import pack_groups
from ratoon.loop.device_memory import DeviceMemory
from ratoon.loop.dry_run import dry_run
from ratoon.loop.memory_policy import (
    FASTEST_FIRST,
    MemoryChoice,
    choose_recompute,
    fitting_mode,
    most_rows,
)
from ratoon.loop.memory_watch import MemoryWatch, StepMemory
from ratoon.loop.ranks import cuts_model
from ratoon.loop.run_memory import RunMemory, left_by_engine, row_counts
from ratoon.loop.stages import plan_updates
from ratoon.models import FreshModelConfig, fresh_tokenizer
from ratoon.planner import CostModel
from ratoon.planner.memory_sizes import WHOLE, GenerationSize, MicrobatchSize, RecomputeMode, WeightsInMemory
from ratoon.rollout.drafts import Ending, GroupDraft, PolicyStamp
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.stopping import StopStrings
from ratoon.types import ModelShape, Prompt, Response, RolloutGroup, UserError

GIB = 1 << 30
QWEN3_1_7B = ModelShape(
    num_layers=28, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151_936,
    intermediate_size=6144, tied_embeddings=True,
)  # fmt: skip
MEMORY = RunMemory(
    shape=QWEN3_1_7B,
    weights=WeightsInMemory(
        num_parameters=1_720_574_976, num_trainable_parameters=1_720_574_976, dtype_bytes=2
    ),
    generation=GenerationSize(cache_tokens=100_000, num_concurrent=256),
    worst=MicrobatchSize(num_rows=32_768, num_scored=30_000, has_qk_norm=True),
    longest_sequence=4_096,
    on_cuda=True,
    shards=WHOLE,
)  # fmt: skip


def gpu(gib: float) -> DeviceMemory:
    return DeviceMemory.of_total("cuda", int(gib * GIB))


def recipe_with(tiny: TinyRun, *overrides: str) -> Recipe:
    return load_recipe(tiny.recipe, overrides)


def test_ever_smaller_gpus_compute_more_again_and_then_refuse(tiny: TinyRun):
    recipe = recipe_with(tiny)
    found = [fitting_mode(MEMORY, gpu(gib)) for gib in (400, 192, 141, 80, 40, 8)]
    places = [len(FASTEST_FIRST) if mode is None else FASTEST_FIRST.index(mode) for mode in found]
    assert places == sorted(places)
    assert set(found) == {*FASTEST_FIRST, None}
    choice = choose_recompute(recipe, MEMORY, gpu(400))
    assert choice.recompute == "none"
    assert choice.applied_to(recipe).model.recompute == "none"
    assert "predicted peak" in choice.sentence and "GiB (backward)" in choice.sentence


@given(
    st.integers(1, 10**9), st.integers(1, 200_000), st.booleans(), st.sampled_from([2, 4]), st.floats(0.1, 300),
    st.booleans(),
)  # fmt: skip
def test_what_auto_takes_fits_and_nothing_faster_does(
    num_parameters: int, num_rows: int, is_compiled: bool, dtype_bytes: int, gib: float, on_cuda: bool
):
    memory = replace(
        MEMORY,
        weights=WeightsInMemory(
            num_parameters=num_parameters, num_trainable_parameters=num_parameters, dtype_bytes=dtype_bytes
        ),
        worst=MicrobatchSize(num_rows=num_rows, num_scored=num_rows, is_compiled=is_compiled),
        longest_sequence=min(100, num_rows),
        on_cuda=on_cuda,
    )
    device = DeviceMemory.of_total("cuda" if on_cuda else "cpu", int(gib * GIB))
    found = fitting_mode(memory, device)
    for mode in FASTEST_FIRST:
        fits = memory.at_worst(mode).peak_bytes <= device.usable_bytes
        if mode == found:
            assert fits
            break
        assert not fits
    rows = most_rows(memory, device)
    if rows is not None:
        assert memory.at_worst("full", max_rows=rows).peak_bytes <= device.usable_bytes
        assert memory.longest_sequence <= rows <= num_rows


@pytest.mark.parametrize(("num_rows", "gib", "names"), [(32_768, 45, "cache"), (131_072, 60, "rows")])
def test_a_run_that_cannot_fit_is_told_what_would(tiny: TinyRun, num_rows: int, gib: float, names: str):
    """The values it names do fit."""
    recipe, device = recipe_with(tiny), gpu(gib)
    memory = replace(MEMORY, worst=replace(MEMORY.worst, num_rows=num_rows, num_scored=num_rows))
    assert fitting_mode(memory, device) is None
    with pytest.raises(UserError, match="one step needs") as refused:
        choose_recompute(recipe, memory, device)
    message = str(refused.value)
    rows = re.search(r"planner\.max_rows_per_microbatch = (\d+)", message)
    cache = re.search(r"rollout\.cache_tokens = (\d+)", message)
    assert "adapters, [model.lora]" in message
    assert (rows if names == "rows" else cache) is not None
    if rows is not None:
        fewer = memory.at_worst("full", max_rows=int(rows[1]))
        assert fewer.peak_bytes <= device.usable_bytes
    if cache is not None:
        smaller = memory.with_cache(int(cache[1]))
        assert fitting_mode(smaller, device) is not None
    with pytest.raises(UserError, match="take a smaller model"):
        choose_recompute(recipe, memory, gpu(3))


def test_offloading_is_for_a_gpu(tiny: TinyRun):
    recipe = recipe_with(tiny, "--trainer.offload_optimizer=true")
    with pytest.raises(UserError, match="trains on the CPU"):
        choose_recompute(recipe, MEMORY, DeviceMemory.of_total("cpu", 500 * GIB))
    offloaded = replace(MEMORY, weights=replace(MEMORY.weights, is_optimizer_on_host=True))
    assert fitting_mode(offloaded, gpu(50)) is not None
    assert fitting_mode(MEMORY, gpu(50)) is None
    with pytest.raises(UserError, match=r"trainer\.offload_optimizer = true"):
        choose_recompute(recipe_with(tiny), MEMORY, gpu(50))


def test_eight_bit_moments_are_proposed_where_they_fit(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    rounded = replace(MEMORY, weights=replace(MEMORY.weights, has_eight_bit_moments=True))
    assert fitting_mode(rounded, gpu(50)) is not None
    assert fitting_mode(MEMORY, gpu(50)) is None
    with pytest.raises(UserError, match=r'trainer\.optimizer_states = "8bit"'):
        choose_recompute(recipe_with(tiny), MEMORY, gpu(50))
    monkeypatch.setattr("ratoon.trainer.eight_bit_optimizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the bitsandbytes package"):
        choose_recompute(recipe_with(tiny, "--trainer.optimizer_states=8bit"), rounded, gpu(400))


def test_whole_weights_on_each_process_for_eight_bit_moments(tiny: TinyRun):
    assert cuts_model(recipe_with(tiny), 2)
    assert not cuts_model(recipe_with(tiny, "--trainer.optimizer_states=8bit"), 2)


def test_a_named_mode_is_obeyed_and_warned_of(tiny: TinyRun):
    recipe = recipe_with(tiny, "--model.recompute=none")
    choice = choose_recompute(recipe, MEMORY, gpu(40))
    assert (choice.recompute, choice.is_automatic) == ("none", False)
    assert choice.warning is not None and '"auto"' in choice.warning
    assert choose_recompute(recipe, MEMORY, gpu(400)).warning is None


def test_auto_needs_a_size_and_a_named_mode_does_not(tiny: TinyRun):
    with pytest.raises(UserError, match='set it to "none"'):
        choose_recompute(recipe_with(tiny), None, gpu(100))
    choice = choose_recompute(recipe_with(tiny, "--model.recompute=full"), None, gpu(100))
    assert choice.warning is None
    assert "nothing is predicted" in choice.sentence


def test_row_counts_are_those_of_the_packed_microbatches():
    rng = np.random.default_rng(0)
    groups = [
        RolloutGroup(
            Prompt(str(i), rng.integers(0, 9, 3 + i)), tuple(Response(rng.integers(0, 9, 2 + j)) for j in range(4))
        )
        for i in range(7)
    ]
    cost = CostModel.from_shape(QWEN3_1_7B, flops_per_s=1e12)
    for update in plan_updates(groups, num_updates=2, num_ranks=2, max_rows_per_microbatch=40, cost=cost):
        for rank in (0, 1):
            layouts = [
                pack_groups([update.groups[index].select(chosen) for index, chosen in parts])
                for parts in update.plan.assignment[rank]
            ]
            assert row_counts(update, rank) == [(layout.num_rows, layout.num_scored, 0) for layout in layouts]


def test_rows_of_kept_prompts_are_counted():
    groups = [RolloutGroup(Prompt("p", np.full(10, 3)), (Response(np.full(6, 4)),) * 4)]
    (update,) = plan_updates(
        groups, num_updates=1, num_ranks=1, max_rows_per_microbatch=22,
        cost=CostModel(seconds_per_microbatch=0.0), keeps_prompts=True,
    )  # fmt: skip
    assert row_counts(update, 0) == [(22, 12, 10), (22, 12, 10)]
    plain, kept = (MEMORY.of_updates([[(22, 12, rows)]], "none") for rows in (0, 10))
    assert plain is not None and kept is not None and kept.activations > plain.activations


def test_a_step_is_predicted_by_its_largest_microbatch():
    small, large = (
        MEMORY.of_updates([[(100, 50, 0)]], "none"),
        MEMORY.of_updates([[(100, 50, 0), (9000, 8000, 0)]], "none"),
    )
    assert small is not None and large is not None
    assert large.activations > small.activations
    assert (small.kept_gradients, large.kept_gradients) == (0, large.gradients)
    assert MEMORY.of_updates([[(0, 0, 0)]], "none") is None


def watch_of(memory: RunMemory | None, recompute: RecomputeMode = "none", total_bytes: int = 100 * GIB) -> MemoryWatch:
    choice = MemoryChoice(
        recompute=recompute, is_automatic=True, memory=memory, device=DeviceMemory.of_total("cpu", total_bytes)
    )
    return MemoryWatch(choice, torch.device("cpu"))


def test_the_peak_of_a_phase_is_its_own(monkeypatch: pytest.MonkeyPatch):
    """Rollout took more; the update is warned of by what it took itself."""
    resident = {"VmRSS": GIB, "VmHWM": GIB}
    monkeypatch.setattr("ratoon.loop.memory_watch._status_bytes", resident.get)
    watch = watch_of(MEMORY)
    watch.enter("generate")
    resident["VmHWM"] = 500 * GIB
    watch.enter("update")
    resident["VmHWM"] = 3 * GIB
    watch.enter("checkpoint")
    resident["VmHWM"] = 900 * GIB
    found = watch.of_step([[(100, 50, 0)]])
    assert found.peak_bytes == 499 * GIB
    assert found.warning is None
    watch.enter("update")
    resident["VmHWM"] = 800 * GIB
    again = watch.of_step([[(100, 50, 0)]])
    assert again.peak_bytes == 799 * GIB
    assert again.warning is not None and "799.0 GiB" in again.warning
    assert watch.of_step([]) == StepMemory(peak_bytes=None, predicted_bytes=None)
    assert watch_of(None).of_step([[(5, 2, 0)]]).predicted_bytes is None


def test_a_wrong_prediction_is_no_matter_where_the_largest_step_fits_all_the_same(monkeypatch: pytest.MonkeyPatch):
    resident = {"VmRSS": 0, "VmHWM": 0}
    monkeypatch.setattr("ratoon.loop.memory_watch._status_bytes", resident.get)
    update = [[(100, 50, 0)]]
    largest, step = MEMORY.at_worst("none"), MEMORY.of_updates(update, "none")
    assert largest is not None and step is not None
    watch = watch_of(MEMORY, total_bytes=4 * largest.update_bytes)
    for times, is_warned in ((1.5, False), (5.0, True)):
        watch.enter("update")
        resident["VmHWM"] = int(times * step.update_bytes)
        warning = watch.of_step(update).warning
        assert (warning is not None) == is_warned
        assert warning is None or f"would take {times * largest.update_bytes / GIB:.1f} of the" in warning


def test_a_run_says_its_choice_once_and_logs_both_numbers(tiny: TinyRun):
    assert tiny.train("--trainer.num_steps=2").status == 0
    log = (tiny.run_dir / "run.log").read_text()
    assert log.count("memory: recompute none: predicted peak") == 1
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["memory_predicted_gib"] > 0 for row in steps)
    assert all(row["memory_peak_gib"] is None or row["memory_peak_gib"] > 0 for row in steps)
    assert 'recompute = "auto"' in (tiny.run_dir / "recipe.toml").read_text()


def test_a_run_goes_on_with_another_mode(tiny: TinyRun):
    """Results do not depend on it: who runs out of memory loses no step."""
    assert tiny.train("--trainer.num_steps=1").status == 0
    assert tiny.train("--trainer.num_steps=2", "--model.recompute=full").status == 0
    assert "memory: recompute full (as the recipe says)" in (tiny.run_dir / "run.log").read_text()


@pytest.mark.parametrize("cache_tokens", [None, 1_000])
@pytest.mark.parametrize("max_concurrent", [3, 100])
def test_the_paged_engines_cache_is_what_it_makes(tiny: TinyRun, max_concurrent: int, cache_tokens: int | None):
    overrides = ["--rollout.engine=paged", f"--rollout.max_concurrent_responses={max_concurrent}"]
    overrides += [] if cache_tokens is None else [f"--rollout.cache_tokens={cache_tokens}"]
    recipe = recipe_with(tiny, *overrides)
    plan = dry_run(recipe, recipe_dir=tiny.folder)
    assert plan.memory is not None
    rollout, longest = recipe.rollout, plan.data.lengths.maximum
    tokenizer = fresh_tokenizer(FreshModelConfig())
    stamp = PolicyStamp()
    batch = PagedBatch(FakeRunner(64, 4096, stamp, False, 8), max_concurrent, rollout.cache_tokens)
    for index in range(rollout.prompts_per_step):
        group = GroupDraft.start(
            Prompt(index, np.ones(longest, np.int64)),
            rollout.group_size,
            rollout.sampling_params(0),
            step=0,
            ending=Ending(frozenset(), StopStrings((), tokenizer), rollout.max_response_tokens),
            stamp=stamp,
            max_support_ids=10,
        )
        batch.add(group)
    batch.step()
    assert batch.num_blocks * 64 <= plan.memory.generation.cache_tokens <= (batch.num_blocks + 2) * 64


def test_vllm_keeps_its_share_of_a_gpu(tiny: TinyRun):
    recipe = recipe_with(tiny, "--rollout.engine=vllm", "--rollout.vllm.gpu_memory_utilization=0.25")
    assert left_by_engine(gpu(100), recipe).usable_bytes == gpu(100).usable_bytes - 25 * GIB
    assert left_by_engine(gpu(100), recipe_with(tiny)) == gpu(100)
    asleep = recipe_with(tiny, "--rollout.engine=vllm", "--rollout.vllm.sleep=1")
    assert left_by_engine(gpu(100), asleep) == gpu(100)
