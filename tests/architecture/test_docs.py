# SPDX-License-Identifier: Apache-2.0
"""What the documents show is true: links lead somewhere, examples parse, commands exist."""

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.architecture.source import ROOT, tracked

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
DOCUMENTS = tracked("*.md")


def blocks(document: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(document.read_text()) if language in languages]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make_words(document: Path) -> set[str]:
    """Targets that a document asks for: in fenced shell lines and in `make x`."""
    shell = "\n".join(blocks(document, "bash", "sh", "shell"))
    return set(re.findall(r"^make ([a-z][a-z0-9-]*)", shell, re.MULTILINE)) | set(
        re.findall(r"`make ([a-z][a-z0-9-]*)", document.read_text())
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = [
        target
        for target, _ in LINK.findall(FENCE.sub("", document.read_text()))
        if "://" not in target and not (document.parent / target).exists()
    ]

    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_parse(document: Path) -> None:
    for text in blocks(document, "python", "py"):
        ast.parse(text)
    for text in blocks(document, "json"):
        json.loads(text)
    for text in blocks(document, "toml"):
        tomllib.loads(text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_exist(document: Path) -> None:
    assert make_words(document) <= targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_kvpool_commands_are_understood(document: Path) -> None:
    parser = pytest.importorskip("kvpool.cli.parser").build_parser()
    for text in blocks(document, "bash", "sh", "shell"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kvpool"] and not {"--help", "--version"} & set(words):
                parser.parse_args(words[1:])
