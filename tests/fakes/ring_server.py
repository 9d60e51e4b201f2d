# SPDX-License-Identifier: Apache-2.0
"""A cache server whose movers have a fake device: ``python tests/fakes/ring_server.py server --config FILE``."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "cacheserver")]
    from tests.fakes.mover_rig import COMMAND

    from kvpool.config import decode_server
    from kvpool.server.compose import run_server

    sys.exit(run_server(decode_server(Path(sys.argv[-1]).read_bytes(), os.environ), COMMAND))
