# SPDX-License-Identifier: Apache-2.0
"""The mover's program with a fake device: ``python tests/fakes/mover_process.py CONTROL PARENT``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "cacheserver")]
    from tests.fakes.ring_device import main

    main(int(sys.argv[1]), int(sys.argv[2]))
