# SPDX-License-Identifier: Apache-2.0
"""Freeze the committed state as the release that the next one must get along with: its wheel and its recorded frames.

    python -m tools.freeze

It replaces what was frozen before, since one release of skew is what is promised: the frozen client runs against the
present server, and the reverse, in ``tests/integration/test_version_skew.py``.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.vllm_env import find_uv

__all__ = ["FROZEN", "main"]

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "tests" / "golden" / "frozen"
FRAMES = "tests/golden/frames/protocol-1.json"


def main() -> int:
    """Command line; says what was frozen."""
    with tempfile.TemporaryDirectory() as folder:
        tree, built = Path(folder) / "tree", Path(folder) / "built"
        export(tree)
        run(find_uv(), "build", "--quiet", "--wheel", "--out-dir", str(built), str(tree))
        wheel = next(built.glob("*.whl"))
        shutil.rmtree(FROZEN, ignore_errors=True)
        FROZEN.mkdir(parents=True)
        shutil.copy(wheel, FROZEN / wheel.name)
        shutil.copy(tree / FRAMES, FROZEN / "frames.json")
    commit = run("git", "rev-parse", "HEAD").decode().strip()
    (FROZEN / "COMMIT").write_text(f"{commit}\n")
    print(f"freeze: {wheel.name} of {commit[:12]} lies in {FROZEN.relative_to(ROOT)}")
    return 0


def export(target: Path) -> None:
    """Write the committed tree, without anything that is only lying around."""
    with tarfile.open(fileobj=io.BytesIO(run("git", "archive", "HEAD"))) as archive:
        archive.extractall(target, filter="data")


def run(*command: str) -> bytes:
    """Return what *command* printed.

    Raises:
        SystemExit: it failed; its own words are on standard error.
    """
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"freeze: {' '.join(command[:2])} failed; see above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
