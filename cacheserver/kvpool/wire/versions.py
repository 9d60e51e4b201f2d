# SPDX-License-Identifier: Apache-2.0
"""Protocol versions: which one two ends speak."""

from typing import Final

from kvpool.model.errors import VersionMismatch

__all__ = ["MOVING", "VERSION_MAX", "VERSION_MIN", "agree"]

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1

MOVING: Final = "moving"
"""A feature of servers: commits may come while a mover is still at the bytes."""


def agree(theirs_min: int, theirs_max: int) -> int:
    """Return the highest version that both ends speak.

    Raises:
        VersionMismatch: there is none.
    """
    version = min(VERSION_MAX, theirs_max)
    if version < max(VERSION_MIN, theirs_min):
        raise VersionMismatch(
            f"this server speaks protocol {VERSION_MIN} to {VERSION_MAX}, the client {theirs_min} to {theirs_max}; "
            "upgrade the older side"
        )
    return version
