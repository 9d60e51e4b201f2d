# SPDX-License-Identifier: Apache-2.0
"""What the doctor knows of a machine, as values; the checks see nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EngineFacts", "Facts", "GpuFacts", "GpusFacts", "MemoryFacts", "ServerFacts", "SocketFacts", "TokenFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The folder of the arena and the memory behind it."""

    directory: str
    total_bytes: int
    free_bytes: int
    ours_bytes: int
    """Bytes that segments of an earlier server of this pool hold there: the next one adopts them."""

    limit_bytes: int | None
    """Lowest memory limit of this process's cgroups; None without one."""

    refusal: str = ""
    """Why the arena would not open; empty if it would."""

    copy_bytes_per_s: float = 0.0
    """Speed of one thread that copies memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketFacts:
    """The folder of the server's Unix socket."""

    path: str
    folder: str
    folder_exists: bool
    writable: bool
    """This user may make a socket there; for a folder that is absent: may make the folder."""

    exists: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What came of saying Hello to the server."""

    address: str
    named: bool = True
    """The user named this address; otherwise it is the default, and that no server runs there yet is no failure."""

    problem: str = ""
    """Why there was no welcome, and the remedy; empty if there was one."""

    server_id: str = ""
    version: str = ""
    tenant: str = ""
    chunk_tokens: int = 0
    round_trip_s: float = 0.0
    descriptor_socket: str = ""
    descriptor_problem: str = ""
    """Why segments cannot be had there; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """The service-account token, without its secret part."""

    path: str
    problem: str = ""
    issued_ago_s: float = 0.0
    """Age by this machine's clock; negative: issued in the future."""

    expires_in_s: float = 0.0
    audience: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine's Python environment."""

    python: str
    problem: str = ""
    packages: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One NVIDIA GPU, and what came of trying it out; empty texts where all is well."""

    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int
    mig: bool
    """Cut into instances: then nothing is tried."""

    problem: str = ""
    """Why nothing could be tried."""

    handle_problem: str = ""
    descriptor_problem: str = ""
    pinning_problem: str = ""
    store_bytes_per_s: float = 0.0
    """From the device to page-locked memory, alone; 0 if it was not measured."""

    load_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusFacts:
    """All GPUs that this process may see."""

    gpus: tuple[GpuFacts, ...] = ()
    problem: str = ""
    """Why none can be seen; empty if there are some, or the driver says that there are none."""

    device_files: bool = False
    """/dev has a driver's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything."""

    system: str
    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    l1_bytes: int
    memory: MemoryFacts
    socket: SocketFacts | None
    """None if the configuration has no Unix socket."""

    open_files: int
    wanted_files: int
    """What a server with this many clients and segments may open."""

    server: ServerFacts
    token: TokenFacts | None
    gpus: GpusFacts
    modes: tuple[str, ...]
    """Transfer modes that the client offers, in order."""

    engine: EngineFacts | None
