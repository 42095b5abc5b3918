"""Where the recipe of a run was, kept in the run's folder: files that the recipe names are relative to it."""

import json
from pathlib import Path

ORIGIN_FILE = "origin.json"


def origin_text(recipe_dir: Path) -> str:
    """What `ORIGIN_FILE` holds of a recipe in `recipe_dir`."""
    return json.dumps({"recipe_dir": str(recipe_dir.absolute())}) + "\n"


def read_origin(run_dir: Path) -> Path | None:
    """The folder that the run's recipe was in, which need not be there any more.

    None where `run_dir` does not say, as runs of version 0.1 do not, and folders that hold no run.
    """
    try:
        return Path(json.loads((run_dir / ORIGIN_FILE).read_text(encoding="utf-8"))["recipe_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def folder_of_files(recipe_file: Path) -> Path:
    """What the files of a recipe are relative to: its folder, and for the recipe in a run's folder the first one's."""
    folder = recipe_file.resolve().parent
    origin = read_origin(folder)
    return folder if origin is None or not origin.is_dir() else origin
