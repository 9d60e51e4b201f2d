# SPDX-License-Identifier: Apache-2.0
"""What every cell of `kvpool bench gpu` needs to know, without a device."""

import sys
import time
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.errors import Failure
from kvpool.config import ClientConfig
from kvpool.model.identity import Mode

__all__ = ["WAYS", "Rig", "Ways", "WrongBytesError", "note", "ring_rig", "run_name"]

_BEGAN_S: Final = time.monotonic()
_TRANSFER_S: Final = 60.0

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


def ring_rig(
    own: OwnServer, *, ceilings: dict[str, float], seconds: float, busy_seconds: float, job_bytes: int, memory: str
) -> Rig:
    """Return what cells need whose engines use *own* through a ring; the other arguments are those of ``Rig``."""
    return Rig(
        config=replace(own.client, modes=(Mode.RING,), transfer_s=_TRANSFER_S),
        server_pid=own.pid,
        chunk_tokens=own.config.chunk_tokens,
        ceilings=ceilings,
        seconds=seconds,
        busy_seconds=busy_seconds,
        job_bytes=job_bytes,
        l1_bytes=own.config.l1.size_bytes,
        memory=memory,
    )


def run_name(run: int) -> str:
    """Return a run's size as cells name it."""
    return f"{run // 1024}KiB"


class WrongBytesError(Failure):
    """Bytes came back that were not stored: nothing that was measured beside them counts."""


def note(text: str) -> None:
    """Say on standard error what was done, and how many seconds after the start."""
    print(f"bench gpu: {time.monotonic() - _BEGAN_S:6.1f} s  {text}", file=sys.stderr, flush=True)
