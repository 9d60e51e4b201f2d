# SPDX-License-Identifier: Apache-2.0
"""Where the programs of a control plane are looked for, and how they are built; the build itself is a stand-in."""

import os
import stat
from pathlib import Path

import pytest
from tools import cluster_assets as tool
from tools.cluster_assets import ASSETS, CONTROL_PLANE, KUBERNETES, Asset, AssetError

ETCD = ASSETS["etcd"]


def program(folder: Path, name: str = "etcd") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("")
    return file


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"KVPOOL_CACHE": str(tmp_path / "cache"), **more}


def test_its_own_variable_comes_first_then_the_assets_then_the_cache(tmp_path: Path) -> None:
    cached = program(tmp_path / "cache" / ETCD.home)
    assets = program(tmp_path / "assets")
    own = program(tmp_path / "own")
    known = environ(tmp_path)

    assert tool.find(ETCD, known) == cached
    known["KUBEBUILDER_ASSETS"] = str(assets.parent)
    assert tool.find(ETCD, known) == assets
    known["TEST_ASSET_ETCD"] = str(own)
    assert tool.find(ETCD, known) == own


def test_what_the_assets_lack_comes_from_the_cache(tmp_path: Path) -> None:
    scheduler = ASSETS["kube-scheduler"]
    cached = program(tmp_path / "cache" / scheduler.home, "kube-scheduler")
    program(tmp_path / "assets")

    assert tool.find(scheduler, environ(tmp_path, KUBEBUILDER_ASSETS=str(tmp_path / "assets"))) == cached
    assert tool.find(ASSETS["kwok"], environ(tmp_path)) is None


def test_a_variable_that_names_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="TEST_ASSET_KUBE_APISERVER"):
        tool.find(ASSETS["kube-apiserver"], environ(tmp_path, TEST_ASSET_KUBE_APISERVER=str(tmp_path / "no")))


def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str) -> Path:
    """A `go` that notes its arguments and runs *build* with $out as the file to make."""
    calls = tmp_path / "calls"
    file = tmp_path / "bin" / "go"
    file.parent.mkdir()
    file.write_text(
        '#!/bin/sh\necho "$GOFLAGS $CGO_ENABLED $@" >> '
        f"{calls}\n"
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        f"echo pkg >&2\ncp go.mod {tmp_path}/go.mod 2>/dev/null\n{build}\n"
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GOFLAGS", "-p=1")
    return calls


def test_what_is_missing_is_built_once_with_its_version_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_go(tmp_path, monkeypatch, 'echo built > "$out"')
    helm = ASSETS["helm"]

    found = tool.assets((helm,), environ(tmp_path))
    again = tool.assets((helm,), environ(tmp_path))

    assert found == again == {"helm": tmp_path / "cache" / helm.home / "helm"}
    (call,) = calls.read_text().splitlines()
    assert "-p=1 -mod=mod 0 build" in call
    assert f"-X helm.sh/helm/v4/internal/version.version=v{helm.module.version}" in call
    assert f"require {helm.module.path} v{helm.module.version}" in (tmp_path / "go.mod").read_text()
    assert "[1/1] helm" in capsys.readouterr().err


def test_a_build_that_fails_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_go(tmp_path, monkeypatch, 'echo "no such thing" >&2; echo half > "$out"; exit 1')

    with pytest.raises(AssetError, match="no such thing"):
        tool.assets((ASSETS["helm"],), environ(tmp_path))

    assert tool.find(ASSETS["helm"], environ(tmp_path)) is None
    assert [p.name for p in (tmp_path / "cache" / ASSETS["helm"].home).iterdir()] == [".lock"]


def test_without_go_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(AssetError, match="KUBEBUILDER_ASSETS"):
        tool.assets((ETCD,), environ(tmp_path))


def test_staging_parts_get_the_modules_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_mod = tmp_path / "k8s.mod"
    go_mod.write_text("require (\n\tk8s.io/api v0.0.0\n\tk8s.io/utils v0.0.0-20250101\n\tk8s.io/client-go v0.0.0\n)\n")
    monkeypatch.setattr(tool, "_download", lambda _: {"GoMod": str(go_mod)})
    version = "v0." + KUBERNETES.version.partition(".")[2]

    lines = tool._staging_replaces(KUBERNETES)

    assert f"k8s.io/api => k8s.io/api {version}" in lines
    assert f"k8s.io/client-go => k8s.io/client-go {version}" in lines
    assert "k8s.io/utils" not in lines


def test_the_list_of_programs_is_printed_and_incomplete_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert tool.main(["--print", "--only", "control-plane"]) == 1
    assert "kube-apiserver" in capsys.readouterr().out

    for asset in CONTROL_PLANE:
        program(tmp_path / asset.home, asset.name)
    assert tool.main(["--print", "--only", "control-plane"]) == 0


def test_every_program_has_its_own_name() -> None:
    assert len(ASSETS) == len(tool.CONTROL_PLANE + tool.NODES)
    assert all(isinstance(a, Asset) and a.module.version.count(".") == 2 for a in ASSETS.values())
