import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from tests.loop.tiny_run import VARIANTS, Outcome, TinyRun, write_tiny_recipe

from ratoon.cli.main import main


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], Outcome]:
    """`ratoon ARGUMENTS` in this process."""

    def call(arguments: list[str]) -> Outcome:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as leave:  # argparse
            status = leave.code if isinstance(leave.code, int) else 1
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tmp_path: Path, command: Callable[[list[str]], Outcome]) -> TinyRun:
    write_tiny_recipe(tmp_path)
    return TinyRun(tmp_path, command)


@pytest.fixture(scope="session")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """For the name of a variant, the run folder of the tiny recipe under it, trained without a disturbance."""
    made: dict[str, Path] = {}

    def run_dir(variant: str) -> Path:
        if variant not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            write_tiny_recipe(folder)
            assert main(["train", str(folder / "recipe.toml"), *VARIANTS[variant]]) == 0
            made[variant] = folder / "runs" / "tiny"
        return made[variant]

    return run_dir


@pytest.fixture(scope="session")
def undisturbed(undisturbed_of: Callable[[str], Path]) -> Path:
    """The run folder of the tiny recipe, trained to its end without a disturbance."""
    return undisturbed_of("plain")


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServerContext]:
    """Starts processes that have imported everything already: importing takes longer than the run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ratoon.loop.run"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the server starts without it
    yield context
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
