# SPDX-License-Identifier: Apache-2.0
"""The images, built by the real buildah and run as a cluster would: another user, nothing writable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tools import images
from tools.images import IMAGES, Builder, ImageError

from kvpool._version import __version__
from kvpool_operator.desired.daemon_set import USER

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

MIB = 1 << 20
LARGEST_MIB = {"operator": 280, "server": 180, "payload": 5}
"""What an image may add to its base."""
READ_ONLY = (
    'mount --rbind "$1" "$1" && mount -o remount,bind,ro "$1" && mount -t proc proc "$1/proc" && '
    'root="$1" && shift && exec chroot --userspec="$USER_ID:$USER_ID" "$root" "$@"'
)


@pytest.fixture(scope="module")
def builder() -> Builder:
    """Buildah; without it, or without root, the reason why not."""
    try:
        found = images.buildah()
    except ImageError as e:
        if os.environ.get("KVPOOL_EXPECT_IMAGES"):
            pytest.fail(str(e))
        pytest.skip(str(e))
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    return found


@dataclass
class Built:
    """One image, and its files as a folder."""

    name: str
    reference: str
    root: Path
    config: dict[str, object]
    size: int

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run *command* in it, as its user, with a root file system that nobody can write."""
        environment = dict(entry.split("=", 1) for entry in self.config.get("Env", []))  # type: ignore[attr-defined]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(self.root), *command],
            env=environment | {"USER_ID": str(USER), "PATH": f"{environment['PATH']}:/usr/sbin:/sbin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.run("python3", "-c", code)


def buildah(*arguments: str) -> str:
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module", params=list(IMAGES))
def built(request: pytest.FixtureRequest, builder: Builder) -> Iterator[Built]:
    name = str(request.param)
    base, reference = images.local_base(), f"localhost/kvpool-test-{name}:{os.getpid()}"
    images.build(builder, IMAGES[name], reference, {"BASE_IMAGE": base, "BUILD_IMAGE": base})
    container = buildah("from", reference)
    try:
        about = json.loads(buildah("inspect", "--type", "image", reference))["OCIv1"]["config"]
        root = Path(buildah("mount", container))
        yield Built(name, reference, root, about, sum(f.lstat().st_size for f in payload_of(name, root)))
    finally:
        buildah("rm", container)
        buildah("rmi", reference)


def payload_of(name: str, root: Path) -> Iterator[Path]:
    """The files that an image adds to its base."""
    return (root / ("payload" if name == "payload" else "opt/kvpool")).rglob("*")


def test_its_user_is_a_number_that_is_not_root(built: Built) -> None:
    assert built.config["User"] == f"{USER}:{USER}"


def test_it_adds_no_more_than_it_needs(built: Built) -> None:
    assert built.size < LARGEST_MIB[built.name] * MIB


def test_it_brings_no_tool_to_install_more(built: Built) -> None:
    added = {p.name for p in payload_of(built.name, built.root)}

    assert not added & {"pip", "setuptools", "wheel", "pip3"}


def test_nothing_in_it_can_be_written(built: Built) -> None:
    assert built.run("touch", "/opt/x").returncode != 0
    assert built.run("id", "-u").stdout.strip() == str(USER)


@pytest.mark.parametrize("built", ["server"], indirect=True)
def test_the_server_runs(built: Built) -> None:
    program = built.config["Entrypoint"][0]  # type: ignore[index]
    assert built.run(program, "--version").stdout.strip() == f"kvpool {__version__}"
    assert built.run(program, "server", "--help").returncode == 0
    checked = built.python("import kvpool.server.compose, kvpool.metrics.exporter, xxhash, jwt; print('ready')")
    assert checked.stdout.strip() == "ready", checked.stderr


@pytest.mark.parametrize("built", ["operator"], indirect=True)
def test_the_operator_runs(built: Built) -> None:
    said = built.run(*built.config["Entrypoint"], "--help")  # type: ignore[misc]
    assert said.returncode == 0, said.stderr
    assert "controller" in said.stdout
    assert built.config["Cmd"] == ["controller"]


@pytest.mark.parametrize("built", ["payload"], indirect=True)
def test_the_payload_copies_itself_and_is_pure_python(built: Built, tmp_path: Path) -> None:
    target = built.root / "kvpool"  # where the pod mounts the volume that both containers see
    target.mkdir()
    target.chmod(0o777)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0777", "tmpfs", target], check=True)
    try:
        for _ in range(2):  # a restarted init container does it again
            done = built.run(*built.config["Entrypoint"], *built.config["Cmd"])  # type: ignore[misc]
            assert done.returncode == 0, done.stderr
        shutil.copytree(target, tmp_path / "copy")
    finally:
        subprocess.run(["umount", target], check=True)
    copy = tmp_path / "copy"

    assert (copy / "kvpool" / "connector").is_dir()
    assert not (copy / "kvpool_operator").exists()
    # No extension for one Python or processor; a mover's kernel is text for the driver, and no client reads it.
    assert {f.suffix for f in (copy / "kvpool").rglob("*") if f.is_file()} <= {".py", ".typed", ".cu", ".ptx"}
    code = "import kvpool.client.link, kvpool.wire; print(kvpool.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(copy)
