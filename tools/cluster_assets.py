# SPDX-License-Identifier: Apache-2.0
"""Find the programs of a local Kubernetes cluster, or build them from their Go modules.

Each program is looked for in this order: ``TEST_ASSET_<NAME>`` (``TEST_ASSET_KUBE_APISERVER``: the file itself), the
folder ``KUBEBUILDER_ASSETS``, the cache (``KVPOOL_CACHE``, default ``~/.cache/kvpool``; one folder
``cluster-<module>-<version>`` for each module). What is in none of them is built there with the installed Go, each
program once: the control plane takes about ten minutes on two cores. ``GOFLAGS=-p=1 GOMAXPROCS=1`` makes the build
polite.

    python tools/cluster_assets.py [--only control-plane|nodes] [--print]
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ASSETS", "CONTROL_PLANE", "NODES", "AssetError", "assets", "cache_folder", "find", "main"]

PROGRESS_S: Final = 20.0
"""A long build says so this often."""


class AssetError(RuntimeError):
    """A program is neither here nor can it be built; the text says what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class Module:
    """One Go module that programs are built from, at one version."""

    name: str
    path: str
    version: str
    stamps: tuple[str, ...] = ()  # linker variables that hold the version, with {version}, {major} and {minor}
    staging: bool = False  # the module's own go.mod points parts of itself at local folders


@dataclass(frozen=True, slots=True)
class Asset:
    """One program (or, where *folder* is set, one folder of the module's source)."""

    name: str
    module: Module
    package: str = ""  # below the module's path; empty is its root
    tags: str = ""
    cgo: bool = False
    folder: str = ""

    @property
    def home(self) -> str:
        """Name of the cache folder that holds it."""
        return f"cluster-{self.module.name}-{self.module.version}"


KUBERNETES: Final = Module(
    "kubernetes",
    "k8s.io/kubernetes",
    "1.37.2",
    stamps=(
        "k8s.io/component-base/version.gitVersion=v{version}",
        "k8s.io/component-base/version.gitMajor={major}",
        "k8s.io/component-base/version.gitMinor={minor}",
        "k8s.io/client-go/pkg/version.gitVersion=v{version}",
    ),
    staging=True,
)
ETCD: Final = Module("etcd", "go.etcd.io/etcd/server/v3", "3.6.4")
KWOK: Final = Module("kwok", "sigs.k8s.io/kwok", "0.8.0", stamps=("sigs.k8s.io/kwok/pkg/consts.Version=v{version}",))
HELM: Final = Module(
    "helm", "helm.sh/helm/v4", "4.3.2", stamps=("helm.sh/helm/v4/internal/version.version=v{version}",)
)
CONTAINERD: Final = Module("containerd", "github.com/containerd/containerd/v2", "2.4.2")
RUNC: Final = Module("runc", "github.com/opencontainers/runc", "1.5.3", stamps=("main.version={version}",))
CNI: Final = Module("cni", "github.com/containernetworking/plugins", "1.10.0")

CONTROL_PLANE: Final = (
    Asset("etcd", ETCD),
    Asset("kube-apiserver", KUBERNETES, "cmd/kube-apiserver"),
    Asset("kube-controller-manager", KUBERNETES, "cmd/kube-controller-manager"),
    Asset("kube-scheduler", KUBERNETES, "cmd/kube-scheduler"),
    Asset("kwok-stages", KWOK, folder="kustomize/stage"),
    Asset("kwok", KWOK, "cmd/kwok"),
    Asset("kubectl", KUBERNETES, "cmd/kubectl"),
    Asset("helm", HELM, "cmd/helm"),
)
NODES: Final = (
    Asset("kubelet", KUBERNETES, "cmd/kubelet", cgo=True),
    Asset("kube-proxy", KUBERNETES, "cmd/kube-proxy"),
    Asset("containerd", CONTAINERD, "cmd/containerd"),
    Asset("containerd-shim-runc-v2", CONTAINERD, "cmd/containerd-shim-runc-v2"),
    Asset("ctr", CONTAINERD, "cmd/ctr"),
    Asset("runc", RUNC, tags="seccomp", cgo=True),  # without seccomp every pod sandbox fails
    Asset("bridge", CNI, "plugins/main/bridge"),
    Asset("loopback", CNI, "plugins/main/loopback"),
    Asset("host-local", CNI, "plugins/ipam/host-local"),
    Asset("portmap", CNI, "plugins/meta/portmap"),
)
ASSETS: Final = {a.name: a for a in CONTROL_PLANE + NODES}


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder that keeps what was built."""
    return Path(environ.get("KVPOOL_CACHE") or Path.home() / ".cache" / "kvpool")


def find(asset: Asset, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where *asset* is, or None.

    Raises:
        AssetError: its own variable names something that is not there.
    """
    variable = "TEST_ASSET_" + asset.name.upper().replace("-", "_")
    if own := environ.get(variable):
        if not Path(own).exists():
            raise AssetError(f"{variable}: {own} does not exist; correct it or unset it")
        return Path(own)
    folders = [Path(f) for f in [environ.get("KUBEBUILDER_ASSETS")] if f] + [cache_folder(environ) / asset.home]
    return next((f / asset.name for f in folders if (f / asset.name).exists()), None)


def assets(wanted: tuple[Asset, ...] = CONTROL_PLANE, environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return each program's path by name; builds what is missing, one after the other, with progress on standard error.

    Raises:
        AssetError: a program is missing and cannot be built.
    """
    missing = [a for a in wanted if find(a, environ) is None]
    for number, asset in enumerate(missing, 1):
        _make(asset, f"[{number}/{len(missing)}] {asset.name} {asset.module.version}", environ)
    return {a.name: _must_find(a, environ) for a in wanted}


def _must_find(asset: Asset, environ: Mapping[str, str]) -> Path:
    path = find(asset, environ)
    if path is None:
        raise AssetError(f"{asset.name}: built, but not in {cache_folder(environ) / asset.home}")
    return path


def _make(asset: Asset, title: str, environ: Mapping[str, str]) -> None:
    home = cache_folder(environ) / asset.home
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / ".lock", title):
        if find(asset, environ) is not None:  # another process built it while this one waited
            return
        if shutil.which("go") is None:
            raise AssetError(
                f"{asset.name}: not found, and there is no Go to build it; install Go or set KUBEBUILDER_ASSETS"
            )
        with tempfile.TemporaryDirectory(prefix=f".{asset.name}-", dir=home) as scratch:
            result = Path(scratch) / asset.name
            (_copy if asset.folder else _build)(asset, Path(scratch), result, title)
            result.rename(home / asset.name)  # whole or not at all


@contextlib.contextmanager
def _locked(path: Path, title: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{title}: another process builds from this module, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(asset: Asset, scratch: Path, result: Path, title: str) -> None:
    """Build in a small module of its own: `go install pkg@version` refuses modules with replace directives."""
    module = asset.module
    replaces = _staging_replaces(module) if module.staging else ""
    (scratch / "go.mod").write_text(
        f"module build.invalid/{module.name}\n\ngo 1.24\n\nrequire {module.path} v{module.version}\n{replaces}"
    )
    package = f"{module.path}/{asset.package}".rstrip("/")
    command = [
        "go",
        "build",
        "-v",
        "-trimpath",
        "-ldflags",
        _linker_flags(module),
        "-tags",
        asset.tags,
        "-o",
        str(result),
        package,
    ]
    _run(command, scratch, title, {"CGO_ENABLED": "1" if asset.cgo else "0"})


def _linker_flags(module: Module) -> str:
    major, minor, _ = module.version.split(".")
    stamps = [s.format(version=module.version, major=major, minor=minor) for s in module.stamps]
    return " ".join(["-s", "-w", *(f"-X {s}" for s in stamps)])


def _staging_replaces(module: Module) -> str:
    """One replace for each part that the module's go.mod leaves at exactly v0.0.0."""
    text = Path(_download(module)["GoMod"]).read_text()
    parts = re.findall(r"^\s*(\S+) v0\.0\.0$", text, re.MULTILINE)
    version = "v0." + module.version.split(".", 1)[1]
    return "\nreplace (\n" + "".join(f"\t{p} => {p} {version}\n" for p in sorted(set(parts))) + ")\n"


def _download(module: Module) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            ["go", "mod", "download", "-json", f"{module.path}@v{module.version}"],
            cwd=empty,
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        answer: dict[str, str] = json.loads(done.stdout)
    except json.JSONDecodeError:
        answer = {"Error": done.stderr.strip()}
    if answer.get("Error"):
        raise AssetError(f"{module.path} v{module.version}: cannot be fetched: {answer['Error']}")
    return answer


def _copy(asset: Asset, _scratch: Path, result: Path, title: str) -> None:
    _say(f"{title}: copying from the module")
    shutil.copytree(Path(_download(asset.module)["Dir"]) / asset.folder, result, copy_function=shutil.copyfile)
    for folder in [result, *(p for p in result.rglob("*") if p.is_dir())]:
        folder.chmod(0o755)  # the module cache is read-only


def _run(command: list[str], folder: Path, title: str, extra: dict[str, str]) -> None:
    flags = f"{os.environ.get('GOFLAGS', '')} -mod=mod".strip()
    environ = {**os.environ, **extra, "GOFLAGS": flags, "GOWORK": "off"}
    _say(f"{title}: building")
    start, said, lines = time.monotonic(), time.monotonic(), []
    with subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                _say(f"{title}: {said - start:.0f} s, {len(lines)} steps, now {line.strip()[:100]}")
    if process.returncode:
        raise AssetError(f"{title}: `{' '.join(command)}` failed:\n{''.join(lines[-20:])}")
    _say(f"{title}: done in {time.monotonic() - start:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Find or build, then print what was found; the exit status is 1 when something is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("control-plane", "nodes"), help="one half; default: both")
    parser.add_argument("--print", action="store_true", help="only print where each program is; build nothing")
    options = parser.parse_args(arguments)
    wanted = {"control-plane": CONTROL_PLANE, "nodes": NODES, None: CONTROL_PLANE + NODES}[options.only]
    try:
        if not options.print:
            assets(wanted)
        found = {a.name: find(a) for a in wanted}
    except AssetError as e:
        _say(str(e))
        return 1
    for name, path in found.items():
        print(f"{name:26} {path or 'missing'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
