# SPDX-License-Identifier: Apache-2.0
"""Host memory that the copy engines of a device reach by themselves: what the client mapped and the driver took."""

import logging
from typing import Final

from kvpool.transfer.cuda import Context, CudaError

__all__ = ["CudaLocks"]

log = logging.getLogger("kvpool.transfer")

_KINDS: Final = {True: "read and written", False: "only read"}


class CudaLocks:
    """The client's ``PageLocks``. Any thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._locked: dict[int, int] = {}
        self._refused: set[bool] = set()

    def lock(self, address: int, length: int, *, writable: bool) -> bool:
        """See PageLocks."""
        try:
            with self._context.apart():
                self._context.register(address, length, writable=writable)
        except CudaError as e:
            level = logging.DEBUG if writable in self._refused else logging.WARNING
            log.log(level, "kvpool: memory that is %s stays out of reach of copy engines: %s", _KINDS[writable], e)
            self._refused.add(writable)
            return False
        self._locked[address] = length
        return True

    def unlock(self, address: int) -> None:
        """See PageLocks."""
        del self._locked[address]
        try:
            with self._context.apart():
                self._context.unregister(address)
        except CudaError as e:
            log.warning("kvpool: mapped memory stays page-locked: %s", e)

    def reach(self, address: int, length: int) -> bool:
        """True if all of a part is locked, and so by one ``lock``."""
        held = self._locked.copy().items()
        return any(start <= address and address + length <= start + whole for start, whole in held)
