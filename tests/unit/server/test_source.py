# SPDX-License-Identifier: Apache-2.0
"""Noticing that a configuration file changed, in each way in which files change."""

import gc
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.config import ConfigError, ServerConfig, decode_server
from kvpool.server.source import ConfigFile

WAIT_S = 5.0


def text(chunk_tokens: int) -> str:
    return f'{{"chunk_tokens": {chunk_tokens}}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "server.json"
    file.write_text(text(16))
    return file


@pytest.fixture
def source(path: Path) -> Iterator[ConfigFile]:
    with ConfigFile(str(path), lambda content: decode_server(content, {})) as made:
        assert made.watch() >= 0
        yield made


def noticed(source: ConfigFile) -> bool:
    return bool(select.select([source._fd], [], [], WAIT_S)[0])


def next_change(source: ConfigFile) -> ServerConfig | None:
    """Wait as the loop does, until there is another content."""
    while noticed(source):
        if (found := source.changed()) is not None:
            return found
    return None


def test_a_file_that_did_not_change_says_nothing(source: ConfigFile) -> None:
    assert source.changed() is None
    assert not select.select([source._fd], [], [], 0)[0]


def test_a_file_that_is_written_over(source: ConfigFile, path: Path) -> None:
    path.write_text(text(32))

    found = next_change(source)
    assert found is not None
    assert found.chunk_tokens == 32
    assert source.changed() is None


def test_a_file_that_another_one_takes_the_place_of(source: ConfigFile, path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text(64))
    fresh.rename(path)

    found = next_change(source)
    assert found is not None
    assert found.chunk_tokens == 64


def test_a_mounted_config_map(tmp_path: Path) -> None:
    """As the kubelet does it: a dated folder, a link to it, and a link through that; then the link is replaced."""

    def publish(name: str, chunk_tokens: int) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "server.json").write_text(text(chunk_tokens))
        (tmp_path / "..data_tmp").symlink_to(name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("..2030_1", 16)
    (tmp_path / "server.json").symlink_to("..data/server.json")
    with ConfigFile(str(tmp_path / "server.json"), lambda content: decode_server(content, {})) as source:
        source.watch()
        written_at = source.written_at
        publish("..2030_2", 48)
        os.utime(tmp_path / "..2030_2" / "server.json", (0, written_at + 5))

        found = next_change(source)

        assert found is not None
        assert found.chunk_tokens == 48
        assert source.written_at == written_at + 5


def test_a_wrong_content_is_refused_once_and_the_next_one_counts(source: ConfigFile, path: Path) -> None:
    path.write_text("{")
    assert noticed(source)
    with pytest.raises(ConfigError):
        source.changed()
    assert source.changed() is None

    path.write_text(text(128))
    found = next_change(source)
    assert found is not None
    assert found.chunk_tokens == 128


def test_a_file_that_is_away_for_a_moment_is_no_change(source: ConfigFile, path: Path) -> None:
    path.unlink()
    assert source.changed() is None
    path.write_text(text(256))

    assert next_change(source) is not None


def test_closing_leaves_no_descriptor(path: Path) -> None:
    gc.collect()  # what tests before left to it must not end in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ConfigFile(str(path), lambda content: decode_server(content, {})) as made:
        made.watch()
    made.close()

    assert len(list(Path("/proc/self/fd").iterdir())) == before
