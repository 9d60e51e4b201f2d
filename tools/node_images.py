# SPDX-License-Identifier: Apache-2.0
"""Archives of the images that local nodes run, built when something they are made of changed: ours, pause, an engine's.

``next-server`` is the server's image under the version that follows: what an upgrade is tried with.

    python -m tools.node_images [NAME ...]

Each lies in the cache under a name with a fingerprint of its sources; a few older ones of the same image are kept.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tools.cluster_assets import cache_folder
from tools.images import IMAGES, ROOT, Image, ImageError, build, buildah, local_base

from kvpool._version import __version__

__all__ = ["ENGINE", "NAMES", "NEXT_VERSION", "PAUSE", "archive", "build_pause", "main", "reference"]

PAUSE: Final = "localhost/kvpool-pause:1"
ENGINE: Final = Image("kvpool-test-engine", "tests/e2e/engine.Dockerfile")
NAMES: Final = ("pause", "engine", *IMAGES, "next-server")
NEXT_VERSION: Final = "{}.{}.0".format(__version__.split(".")[0], int(__version__.split(".")[1]) + 1)
"""What servers of the image next-server say that they are."""
_KEPT: Final = 3
_CONTEXT: Final = ("pyproject.toml", "requirements-dev.lock", "README.md", "LICENSE", "cacheserver", "operator")
"""What .dockerignore lets into the images of ours."""


def reference(name: str) -> str:
    """The name that containers run image *name* by."""
    if name == "pause":
        return PAUSE
    if name == "next-server":
        return f"localhost/{IMAGES['server'].name}:{NEXT_VERSION}"
    return f"localhost/{(ENGINE if name == 'engine' else IMAGES[name]).name}:{__version__}"


def archive(name: str) -> Path:
    """A docker-archive of image *name*, built unless there is one of the same sources.

    Raises:
        ImageError: it cannot be built here.
    """
    sources, make = {
        "pause": (_pause_sources(), _make_pause),
        "next-server": (_sources("server"), _make_next_server),
    }.get(name) or (_sources(name), _builder_of(name))
    folder = cache_folder() / "images"
    file = folder / f"{name}-{_fingerprint(sources, reference(name))}.tar"
    if file.exists():
        os.utime(file)
        return file
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{reference(name)}: building", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        made = Path(scratch) / "image.tar"
        make(made)
        made.rename(file)  # whole or not at all
    for old in sorted(folder.glob(f"{name}-*.tar"), key=lambda f: f.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return file


def _sources(name: str) -> Iterator[Path]:
    if name == "engine":
        yield ROOT / ENGINE.dockerfile
        return
    yield ROOT / IMAGES[name].dockerfile
    for part in _CONTEXT:
        found = [ROOT / part, *(ROOT / part).rglob("*")]
        yield from sorted(f for f in found if f.is_file() and "__pycache__" not in f.parts)


def _pause_sources() -> Iterator[Path]:
    yield ROOT / "tools" / "pause" / "main.go"


def _fingerprint(sources: Iterator[Path], name: str) -> str:
    found = hashlib.sha256(name.encode())
    for file in sources:
        found.update(f"\0{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def _builder_of(name: str) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        builder, base = buildah(), local_base()
        image = ENGINE if name == "engine" else IMAGES[name]
        build(builder, image, reference(name), {"BASE_IMAGE": base, "BUILD_IMAGE": base})
        _push(reference(name), file)

    return make


def _make_pause(file: Path) -> None:
    """An image of one static program."""
    program = file.with_name("pause")
    build_pause(program)
    container = _call("buildah", "from", "scratch")
    try:
        _call("buildah", "copy", "--quiet", container, str(program), "/pause")
        _call("buildah", "config", "--entrypoint", '["/pause"]', "--user", "65535:65535", container)
        _call("buildah", "commit", "--quiet", container, PAUSE)
    finally:
        _call("buildah", "rm", container)
    _push(PAUSE, file)


def _make_next_server(file: Path) -> None:
    """The server's image with another version in its place."""
    container = _call("buildah", "from", f"docker-archive:{archive('server')}")
    try:
        (version,) = Path(_call("buildah", "mount", container)).glob(
            "opt/kvpool/lib/python3*/site-packages/kvpool/_version.py"
        )
        version.write_text(version.read_text().replace(f'"{__version__}"', f'"{NEXT_VERSION}"'))
        _call("buildah", "commit", "--quiet", container, reference("next-server"))
    finally:
        _call("buildah", "rm", container)
    _push(reference("next-server"), file)


def build_pause(program: Path) -> None:
    """Build the static program alone.

    Raises:
        ImageError: there is no Go, or it fails.
    """
    _call("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(program), str(next(_pause_sources())))


def _push(name: str, file: Path) -> None:
    _call("buildah", "push", "--quiet", name, f"docker-archive:{file}:{name}")


def _call(*command: str) -> str:
    done = subprocess.run(
        command, env=os.environ | {"CGO_ENABLED": "0"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ImageError(f"`{' '.join(command)}` ended with {done.returncode}")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Build what is asked for, or all, and print the archives; 1 with the reason if one cannot be."""
    parser = argparse.ArgumentParser(description="Build the images that local nodes run.", allow_abbrev=False)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=f"of {', '.join(NAMES)}")
    try:
        for name in parser.parse_args(arguments).names or NAMES:
            print(archive(name))
    except ImageError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
