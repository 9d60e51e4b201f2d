# SPDX-License-Identifier: Apache-2.0
"""Facts of the machine that a measurement or a report must carry. Linux."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

from kvpool._version import __version__

__all__ = ["BASE_PACKAGES", "SERVER_PACKAGES", "cpu_model", "machine_facts", "package_versions"]

BASE_PACKAGES: Final = ("blake3", "msgspec", "numpy", "pyzmq")
SERVER_PACKAGES: Final = ("prometheus-client", "pyjwt", "structlog", "xxhash")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, as the kernel reports it."""
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions(names: tuple[str, ...] = (*BASE_PACKAGES, *SERVER_PACKAGES)) -> dict[str, str | None]:
    """Return the installed version of each package; None where it is missing."""
    return {name: _version(name) for name in names}


def machine_facts() -> dict[str, object]:
    """Return what decides how fast this machine is, for people and for comparing runs; no names of hosts or users."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "kvpool": __version__,
        "packages": package_versions(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
