"""Steps of a policy whose microbatches ranks hold together, against those of one process (float64)."""

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run_on_ranks
from tests.trainer.test_sharded_trainer import CASES, assert_same, make_trainer, plan, run

from ratoon.distributed import DataParallel, ranks_mesh, sequence_group, single_process

DEGREE = 2


def work(ranks: DataParallel, _: Path) -> list[list[dict[str, Any]]]:
    """[held whole, cut][case]."""
    group = sequence_group(ranks_mesh("cpu", DEGREE), timeout_s=60)
    return [[run(case, ranks, is_cut=is_cut, group=group) for case in CASES] for is_cut in (False, True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Any]:
    return run_on_ranks(request.param, work, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("found", [2, pytest.param(4, marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_ranks_step_as_one_process(found: list[Any], is_cut: bool, index: int):
    """Losses, norms, counts, divergences and weights; with four ranks, of which two have nothing to do in one case.

    OpenRLHF#913, OpenRLHF#1168, verl#6267: masks or positions are wrong on shards of a sequence.
    """
    expected = run(CASES[index], single_process())
    for of_rank in found:
        got = of_rank[is_cut][index]
        assert got.keys() == expected.keys()
        for part in expected:
            assert_same(part, got[part], expected[part])


def test_an_update_planned_for_other_ranks_is_refused():
    trainer = make_trainer(CASES[0], single_process())
    with pytest.raises(AssertionError, match="planned for 2 ranks, where 1"):
        trainer.step(plan(CASES[0], 1, 2), learning_rate=0.01)
