# SPDX-License-Identifier: Apache-2.0
"""Functions, classes, modules and parameter lists stay small."""

import ast
import functools
import statistics
import tomllib

import pytest
from tests.architecture.source import ROOT, classes, functions, modules

LIMITS = {"module_lines": 400, "class_lines": 250, "function_lines": 50, "parameters": 7}
MEDIAN_FUNCTION_LINES = 10
ALLOWED = tomllib.loads((ROOT / "tests/architecture/budgets.toml").read_text())


def lines(node: ast.AST) -> int:
    """Lines of a definition without its docstring, which may be as long as it needs."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
    return len(names) + (a.vararg is not None) + (a.kwarg is not None)


@functools.cache
def measured() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {kind: {} for kind in LIMITS}
    for module in modules():
        found["module_lines"][module.name] = len(module.text.splitlines())
        for name, cls in classes(module.tree):
            found["class_lines"][f"{module.name}::{name}"] = lines(cls)
        for name, function in functions(module.tree):
            found["function_lines"][f"{module.name}::{name}"] = lines(function)
            found["parameters"][f"{module.name}::{name}"] = parameters(function)
    return found


@pytest.mark.parametrize("kind", LIMITS)
def test_what_is_over_a_budget_is_listed_exactly(kind: str) -> None:
    over = {name: size for name, size in measured()[kind].items() if size > LIMITS[kind]}

    assert over == ALLOWED[kind]


def test_the_median_function_is_short() -> None:
    assert statistics.median(measured()["function_lines"].values()) <= MEDIAN_FUNCTION_LINES
