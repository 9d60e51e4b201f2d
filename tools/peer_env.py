# SPDX-License-Identifier: Apache-2.0
"""Install LMCache, the peer that kvpool is measured beside, into an environment of its own; print its python's path.

    python tools/peer_env.py

It lies in the same cache as the engine's (tools/vllm_env.py), under a name with a fingerprint of what is installed.
Nothing of it is imported by anything but ``tests/bench/peer_client.py``.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Final

from tools.vllm_env import cache_folder, locked, run, say

__all__ = ["VERSION", "environment", "main"]

VERSION: Final = "0.5.6"
CONSTRAINTS: Final = Path(__file__).resolve().parent / "peer-constraints.txt"


def main() -> int:
    """Command line; the path goes to standard output, everything else to standard error."""
    print(environment())
    return 0


def environment() -> Path:
    """Return the python of the peer's environment, installing it first where it is missing.

    Raises:
        SystemExit: uv is missing or the install failed; uv's own words are on standard error.
    """
    decides = f"{CONSTRAINTS.read_text()}{sys.version_info.major}.{sys.version_info.minor}"
    name = f"peer-{VERSION}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
    target = cache_folder() / name
    python = target / "bin" / "python"
    if not python.exists():
        with locked(target.with_name(f"{name}.lock")):
            if not python.exists():
                build(target)
    return python


def build(target: Path) -> None:
    """Install beside *target* and rename; the caller holds the lock."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    say(f"installing LMCache {VERSION} into {target} (once; about two minutes and 6 GB)")
    run("venv", "--quiet", "--relocatable", "--python", sys.executable, str(partial))
    python = str(partial / "bin" / "python")
    run("pip", "install", "--python", python, "--constraint", str(CONSTRAINTS), f"lmcache=={VERSION}", "torch")
    partial.rename(target)
    say("done")


if __name__ == "__main__":
    raise SystemExit(main())
