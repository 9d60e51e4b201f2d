# SPDX-License-Identifier: Apache-2.0
"""The peer for a bare GPU machine: what travels is pinned, and nothing passes for the native extension that is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import peer_gpu
from tools.peer_gpu import CONSTRAINTS, NEEDED, VERSION, CheckFailed, build, checked, fits, main, place

SUFFIX = ".cpython-312-x86_64-linux-gnu.so"


def site(folder: Path, cuda_ops: str) -> Path:
    """A peer of which the extension is a module of Python's."""
    package = folder / "site" / "lmcache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "lmcache_native.py").write_text("")
    (package / "cuda_ops.py").write_text(cuda_ops)
    (folder / "site" / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\n__version__ = '2.11.0'\n"
    )
    return folder / "site"


def test_everything_that_travels_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), flags=re.MULTILINE))

    assert set(NEEDED) <= pinned
    assert f"lmcache=={VERSION}\n" in CONSTRAINTS.read_text()


def test_what_is_loaded_is_said(tmp_path: Path) -> None:
    said = checked(site(tmp_path, ""))

    assert said["cuda_ops"] == str(tmp_path / "site" / "lmcache" / "cuda_ops.py")
    assert said["torch"] == "2.11.0"


def test_an_extension_for_another_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="undefined symbol"):
        checked(site(tmp_path, "raise ImportError('undefined symbol: of another torch')"))


def test_an_extension_from_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="another extension is loaded: /elsewhere/"):
        checked(site(tmp_path, "__file__ = '/elsewhere/cuda_ops.so'"))


def test_a_missing_peer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--site", str(tmp_path)]) == 1
    assert "build --into" in capsys.readouterr().err


def test_a_build_without_a_fetch_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="peer_gpu fetch"):
        build(tmp_path / "carried", tmp_path / "site")


@pytest.mark.parametrize(("said", "good"), [("2.11.0+cu130 3.12", True), ("2.11.0+cu128 3.12", False), ("", False)])
def test_what_was_compiled_is_for_one_torch_and_one_python(
    said: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, said, ""))

    assert fits({"torch": "2.11.0+cu130", "python": "3.12"}) is good


def test_compiled_libraries_take_the_place_of_the_wheels(tmp_path: Path) -> None:
    built, package = tmp_path / "built", tmp_path / "site" / "lmcache"
    built.mkdir()
    package.mkdir(parents=True)
    for kind in ("cuda_ops", "lmcache_native"):
        (built / f"{kind}{SUFFIX}").write_text("compiled")
        (package / f"{kind}{SUFFIX}").write_text("the wheel's")
        (package / f"{kind}.abi3.so").write_text("the wheel's")

    place(built, tmp_path / "site")

    assert {file.read_text() for file in package.iterdir()} == {"compiled"}
    assert len(list(package.iterdir())) == 2


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('kernel.cu(3): error: no such thing'); sys.exit(2)"
    monkeypatch.setattr(peer_gpu, "SETUP", script)

    with pytest.raises(CheckFailed, match=r"cannot be compiled \(code 2\):\nkernel.cu\(3\): error: no such thing"):
        peer_gpu.native(sys.executable, tmp_path, tmp_path / "built", seconds=60)


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_gpu, "SETUP", "import signal; signal.pause()")

    with pytest.raises(CheckFailed, match="within"):
        peer_gpu.native(sys.executable, tmp_path, tmp_path / "built", seconds=0.2)
