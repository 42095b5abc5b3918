"""Which optimizer a recipe gets, and what is refused before anything is loaded."""

import re
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from ratoon.trainer import MasterOptimizer, TrainerConfig
from ratoon.trainer.eight_bit_optimizer import EightBitOptimizer
from ratoon.trainer.offloaded_optimizer import OffloadedOptimizer
from ratoon.trainer.optimizer_kinds import optimizer_kind
from ratoon.types import UserError


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, MasterOptimizer),
        ({"offload_optimizer": True}, OffloadedOptimizer),
        ({"optimizer_states": "8bit"}, EightBitOptimizer),
    ],
)
def test_the_recipe_names_the_optimizer(settings: dict[str, Any], kind: type[MasterOptimizer]):
    assert optimizer_kind(TrainerConfig(**settings)) is kind


@pytest.mark.parametrize("other", [{"offload_optimizer": True}, {"sharding": "full"}])
def test_eight_bit_states_go_with_neither_offloading_nor_cut_weights(other: dict[str, Any]):
    with pytest.raises(ValidationError, match=next(iter(other))):
        TrainerConfig(optimizer_states="8bit", **other)
    TrainerConfig(**other)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.trainer.eight_bit_optimizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape('bitsandbytes package: pip install -e ".[8bit]"')):
        EightBitOptimizer([nn.Parameter()], learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95))
