# SPDX-License-Identifier: Apache-2.0
"""Build the images: ``python -m tools.images [operator|server|payload ...]``.

With buildah where it works here (root, Linux), else with docker, else it says why neither does. ``--local-base`` makes
the base image from Debian packages (debootstrap; once, kept in the cache) for machines that reach no image registry.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cluster_assets import cache_folder

from kvpool._version import __version__

__all__ = [
    "IMAGES",
    "LOCAL_BASE",
    "Builder",
    "Image",
    "ImageError",
    "build",
    "buildah",
    "choose",
    "docker",
    "local_base",
    "main",
]

ROOT: Final = Path(__file__).resolve().parents[1]
LOCAL_BASE: Final = "localhost/kvpool-base:bookworm"
_PACKAGES: Final = "python3,python3-venv,ca-certificates"
_UNNEEDED: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
_TRUST: Final = (Path("/etc/ssl/certs"), Path("/usr/local/share/ca-certificates"))
_PASSED_ON: Final = ("PIP_CERT", "PIP_INDEX_URL")


class ImageError(RuntimeError):
    """An image cannot be built here; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of ours."""

    name: str
    dockerfile: str


IMAGES: Final = {
    "operator": Image("kvpool-operator", "operator/Dockerfile"),
    "server": Image("kvpool-server", "cacheserver/Dockerfile"),
    "payload": Image("kvpool-payload", "cacheserver/payload.Dockerfile"),
}


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images, and how it is called."""

    name: str
    command: tuple[str, ...]


def buildah() -> Builder:
    """The buildah of this machine, without a container runtime: its steps run in a chroot.

    Raises:
        ImageError: it is missing, or this user may not.
    """
    if shutil.which("buildah") is None:
        raise ImageError("buildah is not installed")
    if os.geteuid() != 0:
        raise ImageError("buildah in a chroot needs root")
    trust = [v for folder in _TRUST if _has_private_trust() for v in ("--volume", f"{folder}:{folder}:ro")]
    options = ("--isolation", "chroot", "--network", "host", "--layers", "--quiet")
    return Builder("buildah", ("buildah", "bud", *options, *trust))


def _has_private_trust() -> bool:
    """True if packages come through somebody whose certificate only this machine knows."""
    return _TRUST[1].is_dir() and any(_TRUST[1].iterdir())


def docker() -> Builder:
    """The docker of this machine.

    Raises:
        ImageError: it is missing, or its daemon does not answer.
    """
    if shutil.which("docker") is None:
        raise ImageError("docker is not installed")
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise ImageError(f"docker does not answer: {asked.stderr.strip().splitlines()[-1]}")
    return Builder("docker", ("docker", "build"))


def choose() -> Builder:
    """The first that works.

    Raises:
        ImageError: none does; the text has the reason of each.
    """
    reasons = []
    for candidate in (buildah, docker):
        try:
            return candidate()
        except ImageError as e:
            reasons.append(str(e))
    raise ImageError("no image can be built here: " + "; ".join(reasons))


def build(builder: Builder, image: Image, reference: str, arguments: Mapping[str, str]) -> None:
    """Build *image* as *reference* with build *arguments*.

    Raises:
        ImageError: it fails; what the builder says goes to standard error.
    """
    given = {**{k: os.environ[k] for k in _PASSED_ON if k in os.environ}, **arguments}
    extra = [word for k, v in given.items() for word in ("--build-arg", f"{k}={v}")]
    file = str(ROOT / image.dockerfile)
    _run([*builder.command, *extra, "--file", file, "--tag", reference, str(ROOT)], f"{image.name} failed")


def local_base() -> str:
    """Reference of a base image with Debian's Python; made once, kept as an archive in the cache.

    Raises:
        ImageError: debootstrap is missing or fails.
    """
    if _quiet("buildah", "inspect", "--type", "image", LOCAL_BASE):
        return LOCAL_BASE
    archive = cache_folder() / "images" / "base-bookworm.tar"
    if not archive.exists():
        _make_base(archive)
    _run(["buildah", "pull", "--quiet", f"docker-archive:{archive}"], "the base image cannot be read")
    return LOCAL_BASE


def _make_base(archive: Path) -> None:
    if shutil.which("debootstrap") is None:
        raise ImageError("debootstrap is not installed; or name a base: --base-image python:3.13-slim")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".base-", dir=archive.parent) as scratch:
        tree, made = Path(scratch) / "tree", Path(scratch) / "base.tar"
        _say("base image: Debian with Python, about two minutes")
        _run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(tree)],
            "debootstrap failed",
        )
        for folder in _UNNEEDED:
            shutil.rmtree(tree / folder, ignore_errors=True)
        _pack(tree, made)
        made.rename(archive)  # whole or not at all


def _pack(tree: Path, archive: Path) -> None:
    """Make an image of one layer from *tree*."""
    container = _run(["buildah", "from", "scratch"], "buildah cannot start from nothing").strip()
    try:
        _run(["buildah", "add", "--quiet", container, str(tree), "/"], "the base cannot be copied")
        _run(["buildah", "commit", "--quiet", container, LOCAL_BASE], "the base cannot be committed")
    finally:
        _run(["buildah", "rm", container], "a working container stays behind")
    _run(["buildah", "push", "--quiet", LOCAL_BASE, f"docker-archive:{archive}:{LOCAL_BASE}"], "cannot be archived")


def _quiet(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str], failure: str) -> str:
    """Run and return what is printed; the rest, on standard error, is the user's to see."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{failure}: `{' '.join(command)}` ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _build_all(names: Iterable[str], options: argparse.Namespace) -> None:
    builder = choose()
    base = options.base_image
    if options.local_base:
        if builder.name != "buildah":
            raise ImageError("--local-base needs buildah")
        base = local_base()
    for name in names:
        image = IMAGES[name]
        reference = f"{options.registry.rstrip('/')}/{image.name}".lstrip("/") + f":{options.tag}"
        arguments = {"BASE_IMAGE": base, "BUILD_IMAGE": base} if base else {}
        _say(f"{reference}: building with {builder.name}")
        build(builder, image, reference, arguments)
        print(reference)


def main(arguments: list[str] | None = None) -> int:
    """Build what is asked for and print its references; 1 with the reason if it cannot be."""
    parser = argparse.ArgumentParser(description="Build the images of kvpool.", allow_abbrev=False)
    parser.add_argument("images", nargs="*", choices=[*IMAGES, []], metavar="IMAGE", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--tag", default=__version__, help="default: the version")
    parser.add_argument("--registry", default="", help="put before the names, as the chart's image.registry")
    parser.add_argument("--base-image", default="", help="base of all of them; default: what their Dockerfiles say")
    parser.add_argument("--local-base", action="store_true", help="make the base here from Debian packages")
    options = parser.parse_args(arguments)
    try:
        _build_all(options.images or list(IMAGES), options)
    except ImageError as e:
        _say(str(e))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
