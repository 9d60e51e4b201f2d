# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpool.transfer.mover CONTROL PARENT``: the control socket's descriptor, and the server's process id."""

import gc
import socket
import sys

from kvpool.transfer.mover.device import CudaMoverDevice
from kvpool.transfer.mover.process import MoverProcess, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    # All that is alive by now stays: looking through it for garbage takes 5 ms, as long as eight slots' copies.
    gc.freeze()
    MoverProcess(socket.socket(fileno=int(sys.argv[1])), CudaMoverDevice).run()
