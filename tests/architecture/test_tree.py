# SPDX-License-Identifier: Apache-2.0
"""What the tree must not contain."""

import ast
import re

import pytest
from tests.architecture.source import ROOT, Module, modules, tracked

BROAD_ALLOWED = {
    # Every frame gets an answer, whatever a handler does.
    "cacheserver/kvpool/server/dispatch.py": 1,
    "cacheserver/kvpool/server/http.py": 1,
    # Raised again in the thread that asked.
    "cacheserver/kvpool/server/inbox.py": 1,
    # The cache may fail; the engine whose process this is must not.
    "cacheserver/kvpool/client/supervise.py": 1,
    "cacheserver/kvpool/connector/facade.py": 1,
    "cacheserver/kvpool/connector/net.py": 1,
}
"""Handlers of Exception and wider that do not raise again, by file."""

WORKPLACE = re.compile(r"/(work|root)/|/home/[a-z]|/Users/|/tmp/(?!kvpool)[a-z]+/")
URL = re.compile(r"\b(?:https?|git|ssh|ftp)://[^\s)\"'`>]+")
KNOWN_HOSTS = (
    "http://www.apache.org/licenses",
    "http://json-schema.org",
    "https://json-schema.org",
    "https://keepachangelog.com",
    "https://semver.org",
    "https://kubernetes.default",
)
LOCAL = re.compile(
    r"\w+://(?:127\.|\[::1\]|\[?\{|localhost\b|host\b|[\w.-]+\.(?:svc|example|invalid|test)\b|[a-z-]+(?:[:/]|$))"
)
"""Addresses of this machine, of a cluster, or of nobody."""


@pytest.mark.parametrize("folder", ["operator", "cacheserver"])
def test_folder_trap(folder: str) -> None:
    """`operator/__init__.py` would shadow Python's own `operator`."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_first_line_names_the_license(module: Module) -> None:
    assert module.text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_module_says_what_it_is_for(module: Module) -> None:
    assert ast.get_docstring(module.tree)


def broad_handlers(module: Module) -> list[int]:
    found = [n for n in ast.walk(module.tree) if isinstance(n, ast.ExceptHandler)]
    broad = [n for n in found if n.type is None or {"Exception", "BaseException"} & _names(n.type)]
    return [n.lineno for n in broad if not _raises_again(n)]


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """A handler that cleans up and passes everything on hides nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _names(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_broad_except_only_where_it_must_be(module: Module) -> None:
    lines = broad_handlers(module)

    assert len(lines) == BROAD_ALLOWED.get(module.name, 0), f"{module.name}: lines {lines}"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_no_print_outside_the_command_line(module: Module) -> None:
    calls = [n for n in ast.walk(module.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]

    assert module.dotted.startswith("kvpool.cli") or not [c.lineno for c in calls if c.func.id == "print"]  # type: ignore[attr-defined]


CLOCKS = {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep"}
CLOCK_ALLOWED = ("kvpool.server.compose", "kvpool.client", "kvpool.connector", "kvpool.cli")
"""Rooms of a process's own threads; everywhere else time is an argument."""


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_time_is_an_argument(module: Module) -> None:
    uses = [
        n.lineno
        for n in ast.walk(module.tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "time" and n.attr in CLOCKS
    ]

    assert module.dotted.startswith(CLOCK_ALLOWED) or not uses, f"{module.name}: lines {uses}"


def test_no_todo_is_left() -> None:
    word = "TO" + "DO"
    found = [m.name for m in modules() if word in m.text]

    assert not found


def text_files() -> list[tuple[str, str]]:
    out = []
    for path in tracked():
        try:
            out.append((str(path.relative_to(ROOT)), path.read_text()))
        except UnicodeDecodeError:
            continue
    return out


def test_no_path_of_anybodys_machine() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in text_files()
        if name != "tests/architecture/test_tree.py"
        for number, line in enumerate(text.splitlines(), 1)
        if WORKPLACE.search(line)
    ]

    assert not found


def test_no_host_but_known_ones() -> None:
    """No registry, mirror or forge of anybody's: names resolve through the ordinary clients."""
    found = [
        f"{name}: {url}"
        for name, text in text_files()
        if name != "tests/architecture/test_tree.py"
        for url in URL.findall(text)
        if not url.startswith(KNOWN_HOSTS) and not LOCAL.match(url)
    ]

    assert not found
