# SPDX-License-Identifier: Apache-2.0
"""`kvpool sweep` on a node's two folders: what is deleted goes, what lives stays, and no list is guessed."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.arenas_on_disk import MIB, slots_of, small_arena, store

from kvpool.cli.main import main
from kvpool.server.paths import claim

LONG_AGO = 1e9
POOLS = ("a/main", "a/other", "b/main")
"""Namespace and name."""


def uid(pool: str) -> str:
    return f"uid-{pool.replace('/', '-')}"


def listed(*pools: str) -> dict[str, Any]:
    """What kubectl prints."""
    metadata = [dict(zip(("namespace", "name"), p.split("/"), strict=True)) | {"uid": uid(p)} for p in pools]
    items = [{"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCachePool", "metadata": m, "spec": {}} for m in metadata]
    return {"apiVersion": "v1", "kind": "List", "items": items, "metadata": {"resourceVersion": ""}}


class Node:
    """The folders of a node on which each pool had a server that was killed long ago."""

    def __init__(self, folder: Path, pools: tuple[str, ...] = POOLS) -> None:
        self.folder = folder
        self.sockets = folder / "run"
        for pool in pools:
            with small_arena(folder, uid(pool)) as arena:
                arena.format(0, MIB, "t")
                store(arena, slots_of(arena, 0, 1), 0)
            (self.sockets / pool).mkdir(parents=True)
            with contextlib.chdir(self.sockets / pool):  # a socket's path is short
                claim("kvpool.sock", 0o600).close()
                for name in ("kvpool.sock", "kvpool.sock.fd", "kvpool.sock.m12345678"):
                    with socket.socket(socket.AF_UNIX) as left:
                        left.bind(name)
        for path in folder.rglob("*"):
            os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)

    def memory(self, pool: str) -> list[str]:
        return sorted(p.name for p in (self.folder / "arena").iterdir() if f".{uid(pool)}." in p.name)

    def doors(self, pool: str) -> list[str]:
        return sorted(p.name for p in (self.sockets / pool).iterdir() if not p.name.endswith(".lock"))

    def sweep(self, pools: dict[str, Any], *options: str) -> int:
        (self.folder / "pools.json").write_text(json.dumps(pools))
        places = ("--directory", str(self.folder / "arena"), "--sockets", str(self.sockets))
        return main(["sweep", "--pools", str(self.folder / "pools.json"), *places, *options])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_deleted_pools_left_goes(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.sweep(listed("a/other")) == 0

    assert [p for p in POOLS if node.memory(p)] == ["a/other"]
    assert [p for p in POOLS if node.doors(p)] == ["a/other"]
    assert all((node.sockets / p).is_dir() for p in POOLS), "engines may still have them mounted"
    told = capsys.readouterr().out
    assert told.count(": removed") == 4
    assert "a/other" not in told
    assert node.sweep(listed("a/other")) == 0
    assert "removed" not in capsys.readouterr().out


def test_a_dry_run_says_it_and_does_nothing(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(node.folder.rglob("*"))

    assert node.sweep(listed("a/main"), "--dry-run") == 0

    assert capsys.readouterr().out.count("would be removed") == 4
    assert [p for p in sorted(node.folder.rglob("*")) if p.name != "pools.json"] == before


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        (listed(), "--none-exist"),
        ({**listed("a/main"), "metadata": {"continue": "more"}}, "a page"),
        ({"apiVersion": "v1", "kind": "List", "items": [{"kind": "Pod", "metadata": {}}]}, "--pools"),
        ({"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCachePool", "metadata": {}}, "--pools"),
        ({"kind": "Status", "apiVersion": "v1", "items": [], "message": "Forbidden"}, "Status"),
    ],
    ids=["empty", "page", "pods", "one pool", "refusal"],
)
def test_a_list_that_may_not_be_whole_is_refused(
    node: Node, capsys: pytest.CaptureFixture[str], pools: dict[str, Any], says: str
) -> None:
    assert node.sweep(pools) == 2

    assert says in capsys.readouterr().err
    assert all(node.memory(p) and node.doors(p) for p in POOLS)


def test_an_empty_list_is_the_truth_where_somebody_says_so(node: Node) -> None:
    assert node.sweep(listed(), "--none-exist") == 0

    assert not any(node.memory(p) or node.doors(p) for p in POOLS)


def test_nothing_is_followed_out_of_the_folders(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "pool").mkdir(parents=True)
    with contextlib.chdir(outside / "pool"), socket.socket(socket.AF_UNIX) as left:
        left.bind("kvpool.sock")
    os.utime(outside / "pool" / "kvpool.sock", (LONG_AGO, LONG_AGO))
    (node.sockets / "c").symlink_to(outside)
    (node.sockets / "a" / "evil").symlink_to(outside / "pool")

    assert node.sweep(listed(), "--none-exist") == 0

    assert (outside / "pool" / "kvpool.sock").exists()


@contextlib.contextmanager
def alive(node: Node, served: set[str], young: set[str]) -> Iterator[None]:
    """Hold what living servers hold, and make some pools look as if they had started just now."""
    with contextlib.ExitStack() as held:
        for pool in sorted(served):
            held.enter_context(small_arena(node.folder, uid(pool)))
            with contextlib.chdir(node.sockets / pool):
                (node.sockets / pool / "kvpool.sock").unlink()
                held.callback(claim("kvpool.sock", 0o600).close)
                living = held.enter_context(socket.socket(socket.AF_UNIX))
                living.bind("kvpool.sock")
        for pool in POOLS:
            files = [*(node.folder / "arena").glob(f"*.{uid(pool)}.*"), *(node.sockets / pool).iterdir()]
            for file in files if pool not in young else ():
                os.utime(file, (LONG_AGO, LONG_AGO))
            for file in files if pool in young else ():
                os.utime(file)
        yield


some = st.sets(st.sampled_from(POOLS))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some, some, some)
def test_nothing_living_is_ever_removed(tmp_path: Path, exist: set[str], served: set[str], young: set[str]) -> None:
    node = Node(Path(tempfile.mkdtemp(dir=tmp_path)))
    with alive(node, served, young):
        before = {p: (node.memory(p), node.doors(p)) for p in POOLS}

        assert node.sweep(listed(*sorted(exist)), *(["--none-exist"] if not exist else [])) == 0

        for pool in POOLS:
            kept = pool in exist | served | young
            assert (node.memory(pool), node.doors(pool)) == (before[pool] if kept else ([], []))
