# SPDX-License-Identifier: Apache-2.0
"""What every cell of `kvpool bench gpu` needs to know, without a device."""

from typing import Final

from msgspec import Struct

from kvpool.config import ClientConfig

__all__ = ["WAYS", "Rig", "Ways", "run_name"]

Ways = dict[str, tuple[bool, bool]]

WAYS: Final[Ways] = {"store": (True, False), "load": (False, True), "both": (True, True)}


class Rig(Struct, frozen=True, kw_only=True):
    """What every cell needs."""

    config: ClientConfig
    server_pid: int
    chunk_tokens: int
    ceilings: dict[str, float]
    """GB/s by way."""

    seconds: float
    busy_seconds: float
    job_bytes: int
    l1_bytes: int
    memory: str
    """Folder on a tmpfs."""


def run_name(run: int) -> str:
    """Return a run's size as cells name it."""
    return f"{run // 1024}KiB"
