from collections.abc import Callable
from pathlib import Path

import pytest
from tests.loop.tiny_run import Outcome, TinyRun, write_tiny_recipe

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
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the tiny recipe, trained to its end without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_tiny_recipe(folder)
    assert main(["train", str(folder / "recipe.toml")]) == 0
    return folder / "runs" / "tiny"
