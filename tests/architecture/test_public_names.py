# SPDX-License-Identifier: Apache-2.0
"""Public by __all__, private by underscore, and the two agree."""

import ast

import pytest
from tests.architecture.source import Module, modules


def defined(module: Module) -> set[str]:
    """Functions and classes of the module that have no underscore."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {n.name for n in module.tree.body if isinstance(n, kinds) and not n.name.startswith("_")}


def bound(module: Module) -> set[str]:
    """All names at the top of the module, imported ones, too."""
    names = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            case ast.Assign():
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names | defined(module)


def declared(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_all_is_sorted_and_names_what_is_public(module: Module) -> None:
    names = declared(module)
    public = defined(module)
    if names is None:
        assert not public, f"{sorted(public)} without __all__"
        return

    assert names == sorted(names, key=order)
    assert len(names) == len(set(names))
    assert public <= set(names), f"not in __all__: {sorted(public - set(names))}"
    assert set(names) <= bound(module), f"not there: {sorted(set(names) - bound(module))}"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_public_functions_and_classes_have_docstrings(module: Module) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    silent = [
        n.name
        for n in module.tree.body
        if isinstance(n, kinds) and n.name in defined(module) and not ast.get_docstring(n)
    ]

    assert not silent
