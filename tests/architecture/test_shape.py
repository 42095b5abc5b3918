"""Sizes and names of modules and functions."""

import ast
from pathlib import Path

import pytest

import ratoon

SOURCE = Path(ratoon.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
BANNED_NAMES = {"utils", "util", "misc", "common", "helpers", "helper", "manager", "base"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
MAX_KERNEL_FILE_LINES, MAX_KERNEL_LINES = 800, 150


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list)


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_is_small_and_says_what_it_is(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    assert path.stem not in BANNED_NAMES, f"{path}: a drawer, not a module"
    assert ast.get_docstring(tree), f"{path} has no docstring"
    has_kernels = any(is_kernel(node) for node in ast.walk(tree))
    assert len(text.splitlines()) <= (MAX_KERNEL_FILE_LINES if has_kernels else MAX_FILE_LINES)
    for function in functions(tree):
        assert function.end_lineno is not None
        num_lines = function.end_lineno - function.lineno + 1
        assert num_lines <= (MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES), (
            f"{path}:{function.lineno}: {function.name} has {num_lines} lines"
        )
