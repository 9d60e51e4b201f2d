# SPDX-License-Identifier: Apache-2.0
import fcntl
import os
from pathlib import Path

import pytest

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import Folder, PoolLock


@pytest.fixture
def folder(tmp_path: Path):
    with Folder(tmp_path) as opened:
        yield opened


def put(folder: Folder, name: str) -> None:
    os.close(folder.create(name))


def test_names_take_apart(folder: Folder) -> None:
    for text in ("kvpool.a-v1.v1.12.data", "kvpool.a-v1.scopes.tmp", "kvpool.a.b.lock", "other", "kvpool.a.v1.x.head"):
        put(folder, text)

    assert [(n.pool, n.version, n.region, n.kind, n.temporary) for n in folder.names()] == [
        ("a-v1", None, None, "scopes", True),
        ("a-v1", 1, 12, "data", False),
    ]


def test_files_are_private_and_not_inherited(folder: Folder) -> None:
    fd = folder.create("kvpool.p.v1.0.data")

    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_an_existing_file_is_never_created_over(folder: Folder) -> None:
    put(folder, "a")

    with pytest.raises(FileExistsError):
        folder.create("a")


def test_no_symbolic_link_is_followed(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "folder").symlink_to(tmp_path)

    with pytest.raises(OSError, match="symbolic"):
        folder.open("link")
    with pytest.raises(OSError, match="symbolic"):
        folder.open_lock("link")
    with pytest.raises(ArenaError, match=r"l1\.directory.*symbolic link"):
        Folder(tmp_path / "folder")


def test_a_fifo_of_our_name_does_not_hang(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kvpool.p.v1.0.data")

    with pytest.raises(FileNotFoundError, match="no regular file"):
        folder.open("kvpool.p.v1.0.data")


def test_replace_writes_whole_or_not_at_all(folder: Folder, tmp_path: Path) -> None:
    folder.replace("a", b"first")
    put(folder, "a.tmp")  # a former process died between writing and renaming
    folder.replace("a", b"second")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"second"


def test_writers_are_gone_when_their_descriptors_are(folder: Folder) -> None:
    put(folder, "data")
    assert folder.writers_gone("data")
    first, second = folder.open_for_writer("data"), folder.open_for_writer("data")
    copy = os.dup(first)

    os.close(first)
    assert not folder.writers_gone("data")
    os.close(second)
    assert not folder.writers_gone("data"), "a copy of the first is left"
    os.close(copy)
    assert folder.writers_gone("data")


def test_a_reader_is_no_writer(folder: Folder) -> None:
    put(folder, "data")

    with folder.opened("data", writable=False):
        assert folder.writers_gone("data")


def test_of_a_missing_file_there_are_no_writers(folder: Folder) -> None:
    assert folder.writers_gone("nothing")


def test_a_client_that_locks_exclusively_cannot_hang_the_server(folder: Folder) -> None:
    put(folder, "data")
    fd = folder.open_for_writer("data")
    fcntl.flock(fd, fcntl.LOCK_EX)

    with pytest.raises(BlockingIOError):
        folder.open_for_writer("data")
    assert not folder.writers_gone("data")
    os.close(fd)


def test_two_servers_cannot_have_one_pool(folder: Folder) -> None:
    lock = PoolLock(folder, "p")

    with pytest.raises(ArenaError, match=rf"pool 'p'.*process {os.getpid()}.*pool_uid"):
        PoolLock(folder, "p")
    PoolLock(folder, "q").close()
    lock.close()
    PoolLock(folder, "p").close()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(folder: Folder, tmp_path: Path) -> None:
    first = PoolLock(folder, "p")
    opened = iter([os.open(tmp_path / "kvpool.p.lock", os.O_RDWR)])  # opened before the holder removes the file
    first.close(remove=True)
    plain = folder.open_lock
    folder.open_lock = lambda name: next(opened, None) or plain(name)  # type: ignore[method-assign]

    second = PoolLock(folder, "p")

    with pytest.raises(ArenaError, match="in use"):
        PoolLock(folder, "p")
    second.close(remove=True)
    second.close(remove=True)
    assert list(tmp_path.iterdir()) == []
