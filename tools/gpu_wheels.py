# SPDX-License-Identifier: Apache-2.0
"""Fetch the wheels that a bare GPU machine lacks, so that they can travel there with a checkout.

    python tools/gpu_wheels.py [--python 3.12] [--into .wheels]

There, without a network:

    python3 -m pip install --no-index --no-deps --target SITE .wheels/*.whl
    export PYTHONPATH=SITE:cacheserver:.

The machine is taken to have torch, triton, numpy and pytest, as every image that runs an engine's tests has. Versions
are those of requirements-dev.lock. The folder is not part of the repository.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "pinned"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("blake3", "msgspec", "prometheus-client", "pyjwt", "pyzmq", "structlog", "xxhash")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014", "manylinux1")


def pinned(lock: str, names: Sequence[str]) -> list[str]:
    """Return ``name==version`` of each of *names* out of a lock file's text.

    Raises:
        KeyError: one is not in it.
    """
    versions = dict(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", lock, flags=re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fetch wheels for a GPU machine without a network.")
    parser.add_argument("--python", default="3.12", help="its Python (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=ROOT / ".wheels", help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    wanted = pinned((ROOT / "requirements-dev.lock").read_text(), PACKAGES)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={options.python}", "--implementation=cp", *platforms, f"--dest={options.into}"]
    return subprocess.run([*command, *wanted], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
