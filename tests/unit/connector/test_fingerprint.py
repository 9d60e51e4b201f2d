# SPDX-License-Identifier: Apache-2.0
"""Weights are known by their content or their commit, never by their path."""

import os
from pathlib import Path

import pytest

from kvpool.connector.fingerprint import Unidentified, adapter_fingerprint, model_fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "README.md").write_text("hello")
    return made


def test_a_name_needs_a_commit() -> None:
    assert model_fingerprint("org/name", COMMIT, None) == f"hub:{COMMIT}"
    for revision in (None, "main", COMMIT[:39]):
        with pytest.raises(Unidentified, match="no commit"):
            model_fingerprint("org/name", revision, None)


def test_a_snapshot_of_the_hub_is_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)

    assert model_fingerprint(str(snapshot), None, None) == f"hub:{COMMIT}"


def test_the_same_content_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    before = model_fingerprint(str(folder), None, None)
    (folder / "README.md").write_text("other words")
    folder.rename(tmp_path / "moved")

    assert model_fingerprint(str(tmp_path / "moved"), None, None) == before


@pytest.mark.parametrize("change", ["content", "config", "new file", "name"])
def test_other_content_under_the_same_path_is_another_model(folder: Path, change: str) -> None:
    before = model_fingerprint(str(folder), None, None)
    match change:
        case "content":
            (folder / "model.safetensors").write_bytes(b"weightz")
        case "config":
            (folder / "config.json").write_text('{"rope": 2}')
        case "new file":
            (folder / "more.safetensors").write_bytes(b"")
        case "name":
            (folder / "model.safetensors").rename(folder / "other.safetensors")

    assert model_fingerprint(str(folder), None, None) != before


def test_a_file_is_read_once(folder: Path, tmp_path: Path) -> None:
    cache, weights = tmp_path / "cache", folder / "model.safetensors"
    before = model_fingerprint(str(folder), None, cache)
    stat = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert model_fingerprint(str(folder), None, cache) == before, "same size and time: not read again"
    assert model_fingerprint(str(folder), None, None) != before

    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_fingerprint(str(folder), None, cache) != before, "another time: read again"


def test_a_damaged_or_forbidden_cache_only_costs_time(folder: Path, tmp_path: Path) -> None:
    plain = model_fingerprint(str(folder), None, None)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "files.json").write_text("[")

    assert model_fingerprint(str(folder), None, damaged) == plain
    assert model_fingerprint(str(folder), None, folder / "config.json" / "no folder") == plain


def test_adapters_are_folders_with_content(folder: Path, tmp_path: Path) -> None:
    assert adapter_fingerprint(str(folder), None).startswith("files:")
    (tmp_path / "empty").mkdir()
    for path in ("", "org/adapter", str(tmp_path / "empty")):
        with pytest.raises(Unidentified):
            adapter_fingerprint(path, None)
