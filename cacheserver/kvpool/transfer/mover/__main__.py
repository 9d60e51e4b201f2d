# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpool.transfer.mover CONTROL PARENT``: the control socket's descriptor, and the server's process id."""

import socket
import sys

from kvpool.transfer.mover.device import CudaMoverDevice
from kvpool.transfer.mover.process import MoverProcess, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    MoverProcess(socket.socket(fileno=int(sys.argv[1])), CudaMoverDevice).run()
