# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import msgspec
import pytest

from kvpool.arena.files import Folder
from kvpool.arena.scopes import Scopes

A, B, C = (bytes([i]) * 32 for i in range(3))


@pytest.fixture
def folder(tmp_path: Path):
    with Folder(tmp_path) as opened:
        yield opened


def test_names_outlive_the_process(folder: Folder) -> None:
    Scopes(folder, "p").remember(A, "tenant", "model", b"namespace")

    assert Scopes(folder, "p").known() == {A: ("tenant", "model", b"namespace")}
    assert Scopes(folder, "q").known() == {}


def test_what_is_known_is_not_written_again(folder: Folder, tmp_path: Path) -> None:
    scopes = Scopes(folder, "p")
    scopes.remember(A, "t", "m", b"n")
    (tmp_path / "kvpool.p.scopes").unlink()

    scopes.remember(A, "t", "m", b"n")
    assert list(tmp_path.iterdir()) == []
    scopes.remember(A, "t", "renamed", b"n")
    assert Scopes(folder, "p").known() == {A: ("t", "renamed", b"n")}


def test_the_oldest_go_first(folder: Folder) -> None:
    scopes = Scopes(folder, "p", most=2)
    for scope in (A, B, C):
        scopes.remember(scope, "t", "m", scope)

    assert list(scopes.known()) == [B, C]
    assert list(Scopes(folder, "p", most=1).known()) == [C]


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"junk", msgspec.msgpack.encode([(1, 2)]), msgspec.msgpack.encode({})]
)
def test_a_damaged_file_means_unknown_names(folder: Folder, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kvpool.p.scopes").write_bytes(content)
    scopes = Scopes(folder, "p")

    assert scopes.known() == {}
    scopes.remember(A, "t", "m", b"n")
    assert list(Scopes(folder, "p").known()) == [A]


def test_known_is_a_copy(folder: Folder) -> None:
    scopes = Scopes(folder, "p")
    scopes.known()[A] = ("t", "m", b"n")

    assert scopes.known() == {}
