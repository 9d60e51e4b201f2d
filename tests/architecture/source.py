# SPDX-License-Identifier: Apache-2.0
"""The source tree as the architecture tests see it."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "cacheserver" / "kvpool",)


@dataclass(frozen=True)
class Module:
    """One source file of ours."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def dotted(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


@functools.cache
def modules() -> list[Module]:
    """All modules of the shipped packages."""
    return [Module(p) for package in PACKAGES for p in sorted(package.rglob("*.py"))]


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their dotted names, nested ones, too."""
    yield from ((n, f) for n, f in named(tree, "") if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(tree: ast.AST) -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes with their dotted names."""
    yield from ((n, c) for n, c in named(tree, "") if isinstance(c, ast.ClassDef))


def named(node: ast.AST, before: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{before}{child.name}"
            yield name, child
            yield from named(child, f"{name}.")
        else:
            yield from named(child, before)


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that match, committed or about to be: whatever git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
