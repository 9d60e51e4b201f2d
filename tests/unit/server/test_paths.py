# SPDX-License-Identifier: Apache-2.0
"""Unix socket paths: claimed by one, never taken from somebody."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvpool.server.paths import ListenError, claim, created_with


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kvpool.sock"


def test_a_path_is_claimed_once_until_it_is_given_up(path):
    lock = claim(str(path), 0o600)
    with pytest.raises(ListenError, match="another server"):
        claim(str(path), 0o600)

    lock.close()
    lock.close()
    claim(str(path), 0o600).close()


def test_a_claim_that_fails_keeps_no_lock(path):
    path.write_text("")
    for _ in range(2):
        with pytest.raises(ListenError, match="no socket"):
            claim(str(path), 0o600)
    path.unlink()

    claim(str(path), 0o600).close()


def test_a_busy_server_is_a_living_one(path):
    """A full queue of connections refuses the probe, too; it must not be taken for a leftover."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))

        with pytest.raises(ListenError, match="another server"):
            claim(str(path), 0o600)


@pytest.mark.parametrize("step", ["mkdir", "open"])
def test_what_is_not_permitted_names_user_path_and_remedy(path, monkeypatch, step):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "somewhere")

    target = path.parent / "new" / path.name if step == "mkdir" else path
    monkeypatch.setattr(Path if step == "mkdir" else os, step, refuse)

    with pytest.raises(ListenError, match=f"somewhere: not permitted for user {os.getuid()}; give"):
        claim(str(target), 0o600)


@pytest.mark.parametrize(
    ("mode", "folder"), [(0o600, 0o700), (0o660, 0o770), (0o666, 0o775), (0o620, 0o770), (0o606, 0o705)]
)
def test_a_new_folder_lets_in_whom_the_socket_lets_in(tmp_path, mode, folder):
    claim(str(tmp_path / "new" / "kvpool.sock"), mode).close()

    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == folder


def test_a_folder_that_is_there_keeps_its_rights(tmp_path, path):
    tmp_path.chmod(0o755)
    claim(str(path), 0o600).close()

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_files_get_exactly_the_mode_and_the_mask_comes_back(path):
    before = os.umask(0o022)
    try:
        with created_with(0o660), socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        after = os.umask(0o022)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert after == 0o022
