"""Ragged layouts compile nothing anew: what Triton specialises a kernel on stays the same from launch to launch."""

import importlib
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.attention import AttentionPlan
from ratoon.attention.flash import merge_kernels
from ratoon.attention.kernel import Scoring
from ratoon.attention.triton import adding, portable
from ratoon.attention.triton import attention as triton_attention
from ratoon.attention.triton.machine import machine_of
from ratoon.layout import PackedLayout, pack_groups
from ratoon.types import Prompt, Response, RolloutGroup

Key = tuple[Any, ...]


class Recorder:
    """In a kernel's place: what its launches would be compiled for. Nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self.parameters = inspect.signature(kernel.fn).parameters
        if hasattr(kernel, "params"):
            self.unspecialised = {each.name for each in kernel.params if each.do_not_specialize}
        else:  # under Triton's interpreter
            self.unspecialised = set(kernel.kwargs["do_not_specialize"] or ())
        self.keys: list[Key] = []

    def __getitem__(self, grid: Any):
        def launch(*args: Any, **constants: Any) -> None:
            names = [*self.parameters][: len(args)]
            self.keys.append(tuple(map(self._part, names, args)) + tuple(sorted(constants.items())))

        return launch

    def differing(self) -> list[str]:
        """Arguments that a launch was compiled anew for."""
        first = self.keys[0]
        at = {index for key in self.keys for index, part in enumerate(key) if part != first[index]}
        return [name for index, name in enumerate(self.parameters) if index in at]

    def _part(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, bool) or not isinstance(value, int):
            return tuple(getattr(value, "block_shape", ())) or type(value)
        return "an integer" if name in self.unspecialised else (value == 1, value % 16 == 0)


def ragged_layouts() -> list[PackedLayout]:
    """Of one row to some thousands, and so that rows and tiles of 64 and 128 of them are 1, 16 and between."""
    rng = np.random.default_rng(0)
    shapes = [[[1]], [[16, 0]], [[40, 20, 4]], [[1000, 24]], [[1000, 25]], [[2000, 47, 1]], [[200, 56], [3, 3]]]
    shapes += [rng.integers(1, 700, (rng.integers(1, 4), rng.integers(2, 7))).tolist() for _ in range(40)]
    return [
        pack_groups(
            [
                RolloutGroup(Prompt(index, np.arange(P)), tuple(Response(np.arange(R)) for R in Rs))
                for index, (P, *Rs) in enumerate(shape)
            ]
        )
        for shape in shapes
    ]


def recorded(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> dict[str, Recorder]:
    """By the kernel's name, in all of these modules."""
    recorders: dict[str, Recorder] = {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            recorders.setdefault(name, Recorder(getattr(module, name)))
            monkeypatch.setattr(module, name, recorders[name])
    return recorders


@pytest.mark.parametrize(
    ("is_hopper", "dtype", "head_dim", "names"),
    [
        (False, torch.float32, 64, {"forward_kernel", "backward_kernel"}),
        (True, torch.bfloat16, 128, {"forward_kernel", "backward_kernel", "adding_kernel", "finish_kernel"}),
        (True, torch.bfloat16, 64, {"forward_kernel", "backward_kernel", "adding_kernel", "finish_kernel"}),
        (True, torch.bfloat16, 512, {"forward_wide_kernel", "backward_wide_kernel"}),
    ],
)
@pytest.mark.parametrize("window", [None, 100])
def test_launches_of_ragged_layouts_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
    is_hopper: bool,
    dtype: torch.dtype,
    head_dim: int,
    names: set[str],
    window: int | None,
):
    """Each further variant of a Hopper kernel held an update up for two to four seconds, at steps 4, 5, 21 and 55."""
    monkeypatch.setattr(triton_attention, "machine_of", lambda device: machine_of(device)._replace(is_hopper=is_hopper))
    launches = importlib.import_module("ratoon.attention.triton.hopper.launch") if is_hopper else portable
    recorders = recorded(monkeypatch, launches, triton_attention, adding)
    for layout in ragged_layouts():
        plan, T = AttentionPlan.build(layout, "cpu", window), layout.num_rows
        if plan.window != window:
            continue  # no path is longer: served by the kernels without one
        q_THD, k_THD, v_THD = (torch.empty(T, heads, head_dim, dtype=dtype) for heads in (6, 2, 2))
        scoring = Scoring(softmax_scale=0.1)
        out_THD, lse_HT = triton_attention.forward(q_THD, k_THD, v_THD, None, plan, scoring)
        triton_attention.backward(out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, plan, scoring, deterministic=True)
        if "adding_kernel" in names:
            adding.backward(out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, plan, scoring, deterministic=False)
    launched = {name: recorder for name, recorder in recorders.items() if recorder.keys}
    assert names <= launched.keys() and "row_terms_kernel" in launched
    for name, recorder in launched.items():
        assert len(set(recorder.keys)) == 1, f"{name} follows its {recorder.differing()}"


@pytest.mark.parametrize("name", ["merge_level_kernel", "add_level_kernel"])
def test_merging_of_parts_does_not_look_at_the_number_of_rows(name: str):
    parameters = Recorder(getattr(merge_kernels, name))
    of_layout = {"T", "stride_lh", "stride_plh"} & {*parameters.parameters}
    assert of_layout and of_layout <= parameters.unspecialised
