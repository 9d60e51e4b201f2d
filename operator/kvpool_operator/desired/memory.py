# SPDX-License-Identifier: Apache-2.0
"""How much memory a server's pod needs, and how long it may take to touch it."""

import math
from typing import Any, Final

from kvpool_operator.desired.gpu import has_gpus
from kvpool_operator.spec.pool import Pool

__all__ = ["limit_bytes", "request_bytes", "resources", "shm_bytes", "startup_s"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_BASE_BYTES: Final = 512 * _MIB
"""A server without GPUs: interpreter, index, frames under way."""
_GPU_BASE_BYTES: Final = 2 * _GIB
_MOVER_BYTES: Final = 512 * _MIB
_GPUS: Final = 8
"""GPUs of a node are not known beforehand; most nodes have at most so many."""
_FIRST_TOUCH_S_PER_GIB: Final = 0.8
"""One thread touching fresh memory, the slowest way to fill the arena."""


def request_bytes(pool: Pool) -> int:
    """Memory that a server uses when its arena is full, unless the pool says otherwise."""
    if own := pool.spec.resources.requests.memory:
        return int(own)
    overhead = _GPU_BASE_BYTES + _GPUS * _MOVER_BYTES if has_gpus(pool) else _BASE_BYTES
    return _whole_mib(shm_bytes(pool) + overhead)


def limit_bytes(pool: Pool) -> int:
    """A little above the request: Burstable, so that one NUMA node need not hold it all."""
    if own := pool.spec.resources.limits.memory:
        return int(own)
    return _whole_mib(request_bytes(pool) * 1.05 + _GIB)


def resources(pool: Pool) -> dict[str, Any]:
    """The container's requests and limits; no limit on processor time."""
    own = pool.spec.resources
    limits = {"memory": str(limit_bytes(pool))} | ({"cpu": own.limits.cpu} if own.limits.cpu else {})
    cpu = own.requests.cpu or min("2" if has_gpus(pool) else "500m", own.limits.cpu or "2", key=_cores)
    request = min(request_bytes(pool), limit_bytes(pool))
    return {"requests": {"cpu": cpu, "memory": str(request)}, "limits": limits}


def _cores(text: str) -> float:
    return int(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def shm_bytes(pool: Pool) -> int:
    """Bytes of the memory volume: the arena, the slots' headers, a margin."""
    size = pool.spec.l1.size
    return _whole_mib(size + size / 64 + 64 * _MIB)


def startup_s(pool: Pool) -> int:
    """Seconds that a server may take until it answers."""
    return 60 + math.ceil(pool.spec.l1.size / _GIB * _FIRST_TOUCH_S_PER_GIB)


def _whole_mib(size: float) -> int:
    return math.ceil(size / _MIB) * _MIB
