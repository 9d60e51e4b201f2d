# SPDX-License-Identifier: Apache-2.0
"""CURVE keys in files."""

import os
import stat
from pathlib import Path

import pytest

from kvpool.server.keys import KEY_BYTES, KeyFileError, make_key, read_key


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "key")


def test_a_made_key_is_read_back(path):
    public = make_key(path)

    assert read_key(path)[0] == public.encode()
    assert len(public) == KEY_BYTES
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(path):
    make_key(path)
    before = read_key(path)

    with pytest.raises(KeyFileError, match="never overwritten"):
        make_key(path)
    assert read_key(path) == before


def test_a_key_in_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(KeyFileError, match="folder"):
        make_key(str(tmp_path / "gone" / "key"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_reach_is_refused(path, mode):
    make_key(path)
    Path(path).chmod(mode)

    with pytest.raises(KeyFileError, match="chmod 0600"):
        read_key(path)


@pytest.mark.parametrize(("mode", "good"), [(0o440, True), (0o640, True), (0o644, False), (0o660, False)])
def test_the_group_may_read_a_key_of_another_user(path, monkeypatch, mode, good):
    make_key(path)
    Path(path).chmod(mode)
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    if good:
        assert read_key(path)
    else:
        with pytest.raises(KeyFileError):
            read_key(path)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"\xff" * 40, b" " * 40, b"x" * 1000])
def test_what_is_no_key_is_refused_without_being_shown(path, content):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, content)
    os.close(fd)

    with pytest.raises(KeyFileError, match="kvpool keys") as caught:
        read_key(path)
    assert "xxxx" not in str(caught.value)


def test_a_missing_key_says_how_to_make_one(path):
    with pytest.raises(KeyFileError, match="kvpool keys"):
        read_key(path)


def test_a_pipe_is_no_key(path):
    os.mkfifo(path, 0o600)
    keep = os.open(path, os.O_RDWR)

    with pytest.raises(KeyFileError, match="no file"):
        read_key(path)
    os.close(keep)
