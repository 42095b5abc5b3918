"""SIGKILL at any moment, then the same command until the run is complete: bit by bit the run that nothing disturbed."""

import random
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.loop.run_process import cost, cpu_seconds, kill, start, wait_for
from tests.loop.tiny_run import VARIANTS, TinyRun, traces, write_tiny_recipe

NUM_MOMENTS = 20
SAMPLED_MOMENTS = (6, 12, 17)
SAMPLED_KIND = ("dynamic sampling", 2)


class Cost(NamedTuple):
    cpu_s: float
    touches: list[tuple[str, str]]
    """Of files and folders in the run's own folder, in their order."""


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, forks: ForkServerContext) -> Cost:
    """What a run takes that nothing disturbs."""
    tiny = TinyRun(tmp_path_factory.mktemp("whole"), main=lambda _: pytest.fail("not for this"))
    write_tiny_recipe(tiny.folder)
    process = start(forks, tiny)
    process.join(timeout=120)
    assert process.exitcode == 0, (tiny.folder / "output").read_text()
    return Cost(*cost(tiny))


def assert_goes_on_to_the_same_end(tiny: TinyRun, undisturbed: Path, *arguments: str) -> None:
    outcome = tiny.train(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert traces(tiny.run_dir) == traces(undisturbed)
    assert "is complete" in tiny.train(*arguments).out


@pytest.mark.parametrize(
    "moment",
    [pytest.param(m, marks=[] if m in SAMPLED_MOMENTS else pytest.mark.full) for m in range(NUM_MOMENTS)],
)
def test_killed_at_any_of_twenty_moments(
    tiny: TinyRun, undisturbed: Path, forks: ForkServerContext, whole_run: Cost, moment: int
):
    """prime-rl#1712, OpenRLHF#928, OpenRLHF#1103, prime-rl#745: one random moment in each twentieth of the run."""
    share = (moment + random.Random(moment).random()) / NUM_MOMENTS
    process = start(forks, tiny)
    wait_for(lambda: cpu_seconds(process) >= share * whole_run.cpu_s, process)
    assert kill(process) or share > 0.8, (tiny.folder / "output").read_text()
    assert_goes_on_to_the_same_end(tiny, undisturbed)


@pytest.mark.parametrize(
    ("variant", "moment"),
    [
        pytest.param(variant, moment, marks=[] if (variant, moment) == SAMPLED_KIND else pytest.mark.full)
        for variant in VARIANTS
        for moment in range(4)
        if variant != "plain"
    ],
)
def test_killed_runs_of_every_kind(
    tiny: TinyRun,
    undisturbed_of: Callable[[str], Path],
    forks: ForkServerContext,
    whole_run: Cost,
    variant: str,
    moment: int,
):
    """NeMo-RL#2651, NeMo-RL#3066: what a run held beside its weights was lost, or blocked it when it was resumed."""
    process = start(forks, tiny, *VARIANTS[variant])
    share = (moment + random.Random(f"{variant} {moment}").random()) / 4
    wait_for(lambda: cpu_seconds(process) >= share * whole_run.cpu_s, process)
    kill(process)
    assert_goes_on_to_the_same_end(tiny, undisturbed_of(variant), *VARIANTS[variant])


def checkpoint_touches(touches: list[tuple[str, str]]) -> list[int]:
    """Numbers of the touches from the first of checkpoint 4's to the one that ends it, and of those in between."""
    of_it = [number for number, (_, path) in enumerate(touches) if "step-000004" in path and "checkpoints" in path]
    return list(range(of_it[0], of_it[-1] + 3))


@pytest.mark.parametrize("share", [0.5, *(pytest.param(n / 16, marks=pytest.mark.full) for n in range(17) if n != 8)])
def test_killed_while_a_checkpoint_is_written(
    tiny: TinyRun, undisturbed: Path, forks: ForkServerContext, whole_run: Cost, share: float
):
    """prime-rl#1712. Between any two of its files, its rename, and what follows."""
    touches = checkpoint_touches(whole_run.touches)
    process = start(forks, tiny, die_at_touch=touches[round(share * (len(touches) - 1))])
    process.join(timeout=120)
    assert process.exitcode == -9, (tiny.folder / "output").read_text()
    assert_goes_on_to_the_same_end(tiny, undisturbed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_killed_again_and_again(tiny: TinyRun, undisturbed: Path, forks: ForkServerContext, whole_run: Cost, seed: int):
    """Each process dies at a random touch of its folder, be it in resuming, until one comes to the end."""
    chance = random.Random(seed)
    num_killed = 0
    while True:
        process = start(forks, tiny, die_at_touch=chance.randrange(len(whole_run.touches)))
        process.join(timeout=120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -9, (tiny.folder / "output").read_text()
        num_killed += 1
        assert num_killed < 50, "no progress"
    assert num_killed > 0
    assert traces(tiny.run_dir) == traces(undisturbed)
