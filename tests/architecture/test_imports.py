"""What may import what, and what an import may cost."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import pytest

import ratoon

SOURCE = Path(ratoon.__file__).parent
PACKAGES = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
MODULES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("torch", "transformers", "triton", "vllm", "ray")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_import_contract_holds():
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint_imports is not None, "import-linter is not installed beside this Python"
    # Away from the repository's cache: two test processes may check at once.
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=SOURCE.parents[1], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_light_modules_import_nothing_heavy():
    """`import ratoon`, every sub-package, every config module, and whatever plans or parses commands."""
    light = ["ratoon", *map(module_name, PACKAGES), "ratoon.cli.main"]  # it imports the module of each command
    light += [module_name(path) for path in MODULES if path.name == "config.py"]
    for package in ("types", "layout", "planner", "config"):
        light += [module_name(path) for path in MODULES if path.is_relative_to(SOURCE / package)]
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "for name in sys.argv[2:]:\n"
        "    import_module(name)\n"
        "    loaded = [heavy for heavy in sys.argv[1].split(',') if heavy in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'{name} imports {loaded}')\n"
    )
    done = run_python(code, ",".join(HEAVY), *light)
    assert done.returncode == 0, done.stderr


PUBLIC = {
    "ratoon.types": ("Prompt", "Response", "RolloutGroup"),
    "ratoon.layout": ("PackedLayout", "pack_groups", "pack_documents", "pack_sequences"),
    "ratoon.attention": ("forest_attention", "AttentionPlan", "available_impls"),
    "ratoon.ops": ("linear_logprob",),
    "ratoon.models": ("attach", "load_policy", "forward_logprobs"),
    "ratoon.planner": ("plan_step", "CostModel"),
}


def test_public_names_are_where_the_design_says():
    lines = [f"from {package} import {', '.join(names)}" for package, names in PUBLIC.items()]
    done = run_python("\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [module_name(path) for path in PACKAGES])
def test_lazy_names_are_whole(package: str):
    """Every name of `__all__` resolves, to the object its home defines; any other name is an AttributeError."""
    module = import_module(package)
    homes: dict[str, str] = getattr(module, "_HOMES", {})
    names: list[str] = getattr(module, "__all__", [])
    assert sorted(homes) == sorted(names)
    for name in names:
        assert getattr(module, name) is getattr(import_module(f"{package}.{homes[name]}"), name)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES, ids=module_name)
def test_no_module_hides_a_public_name(package: Path):
    """Importing `ratoon.x.name` sets the attribute `name` of `ratoon.x` to the module, for good."""
    names = set(getattr(import_module(module_name(package)), "__all__", []))
    inside = {path.stem for path in package.glob("*.py")} | {path.name for path in package.iterdir() if path.is_dir()}
    assert not names & inside


@pytest.mark.parametrize("path", PACKAGES, ids=module_name)
def test_sub_packages_hold_a_docstring_and_lazy_names_only(path: Path):
    tree = ast.parse((path / "__init__.py").read_text())
    assert ast.get_docstring(tree), f"{path} says nothing about itself"
    imported = {
        name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert imported <= {"importlib", "typing"}, f"{path} imports {imported} when it is imported"


def test_triton_is_known_to_attention_and_ops_only():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            if any(name.split(".")[0] == "triton" for name in names):
                assert path.relative_to(SOURCE).parts[0] in ("attention", "ops"), f"{path} imports triton"


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level names of other projects' packages, and whether importing the module imports them."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"ratoon"}:
            yield name, node in tree.body


def package_names(requirements: list[str]) -> set[str]:
    """As they are imported: none of ours has another name than its package."""
    return {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in requirements}


FOUND_AT_RUN_TIME = {
    "triton": (
        "attention/triton/",
        "attention/flash/merge_kernels.py",
        "attention/invariant/",
        "attention/paged/",
        "ops/logprob/tile_kernels.py",
        "ops/invariant/",
        "ops/sampling/",
    ),
    "flash_attn": ("attention/flash/fa4_package.py",),
    "cutlass": ("attention/flash/fa4_package.py",),
    "vllm": ("rollout/engines/vllm/", "bench/vllm_alone.py"),
}
"""Packages that torch brings along or a machine may have, and the only places that import them."""


def test_attention_needs_none_of_the_packages_that_may_be_found():
    code = (
        "import sys\n"
        "for name in sys.argv[1].split(','):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from ratoon.attention import AttentionPlan, available_impls, forest_attention\n"
        "from ratoon.layout import pack_documents\n"
        "available_impls()\n"
        "x = torch.ones(5, 2, 8)\n"
        "forest_attention(x, x, x, AttentionPlan.build(pack_documents([[1, 2], [3, 4, 5]])))\n"
    )
    done = run_python(code, ",".join([*FOUND_AT_RUN_TIME, "flash_attn_interface"]))
    assert done.returncode == 0, done.stderr


def test_every_import_is_declared_and_no_kernel_wheel_is_among_them():
    """Wheels of flash-attn fit one build of torch, and `import flash_attn` ends in an undefined symbol beside another:
    OpenRLHF#418, OpenRLHF#538, OpenRLHF#243, RL-Factory#50, UserRL#4, RL2#8, flash-attention#1832,
    flash-attention#2219, verl#3351; OpenRLHF#1222 (ring_flash_attn). TRL#4380 asks for training without it.
    dynamo#14571: imported without being declared. Here such a package is used where it is found, from one module
    that nothing imports at once."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    core = package_names(project["dependencies"])
    for name in sorted(core):  # what they bring along for everybody: tokenizers with transformers
        core |= package_names([line for line in requires(name.replace("_", "-")) or [] if "extra ==" not in line])
    extras = set[str]().union(*map(package_names, project["optional-dependencies"].values()))
    for path in MODULES:
        for name, is_at_once in imports_of(path):
            if name in FOUND_AT_RUN_TIME and str(path.relative_to(SOURCE)).startswith(FOUND_AT_RUN_TIME[name]):
                continue
            assert name in core or (name in extras and not is_at_once), f"{path} imports {name}, which is not declared"
    assert not {name for name in core | extras if "flash" in name or name in {"xformers", "apex", "deepspeed"}}
