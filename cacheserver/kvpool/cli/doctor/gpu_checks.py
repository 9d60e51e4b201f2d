# SPDX-License-Identifier: Apache-2.0
"""From facts of the GPUs to checks: can mode ring be used, how fast, and what is missing. Pure."""

from collections.abc import Iterator
from typing import Final

from kvpool.cli.doctor.facts import GpuFacts, GpusFacts
from kvpool.cli.doctor.findings import Check, ok, warn

__all__ = ["gpu_checks"]

GIB: Final = 1 << 30
NEEDED_BYTES: Final = 768 << 20
"""The ring of 256 MiB and a mover's context of some 500."""

SLOW_BYTES_PER_S: Final = 10e9
"""A PCIe 4.0 link of 16 lanes moves 25, a 5.0 one 55."""

_WITHOUT: Final = "no CUDA device: client-moved and streamed modes"


def gpu_checks(f: GpusFacts) -> Iterator[Check]:
    """Yield the checks of all devices, or the one that there is none."""
    if not f.gpus:
        yield _none(f)
    for number, gpu in enumerate(f.gpus):
        yield from _gpu(f"GPU {number}", gpu)


def _none(f: GpusFacts) -> Check:
    text = f"{_WITHOUT} ({f.problem})" if f.problem else _WITHOUT
    if not f.device_files:
        return ok("GPU", text)
    return warn(
        "GPU",
        f"{text}, although /dev has NVIDIA's files",
        "let this container see the driver, too: the RuntimeClass nvidia, or the NVIDIA container runtime with "
        "NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )


def _gpu(name: str, gpu: GpuFacts) -> Iterator[Check]:
    what = f"{gpu.name}, {gpu.uuid}, {gpu.free_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free"
    if gpu.mig:
        yield warn(
            name,
            f"{what}, cut into instances: their memory cannot be shared with a mover",
            "client-moved and streamed modes work; for mode ring use a whole GPU",
        )
        return
    if gpu.free_bytes < NEEDED_BYTES:
        yield warn(
            name,
            f"{what}: a ring and its mover need {NEEDED_BYTES / GIB:.2f} GiB",
            "leave more beside the engine (--gpu-memory-utilization), or make ring_slots and ring_slot_bytes smaller",
        )
    else:
        yield ok(name, what)
    if gpu.problem:
        remedy = "run nvidia-smi in this container; look for Xid errors in the kernel's log"
        yield warn(f"{name} driver", gpu.problem, f"{remedy}; without it: client-moved and streamed modes")
        return
    yield _handles(name, gpu)
    yield _descriptors(name, gpu)
    yield _pinning(name, gpu)
    if not gpu.pinning_problem:
        yield _bandwidth(name, gpu)


def _handles(name: str, gpu: GpuFacts) -> Check:
    if not gpu.handle_problem:
        return ok(f"{name} handles", "another process opens this one's device memory: mode ring")
    return warn(
        f"{name} handles",
        f"another process cannot open this one's device memory: {gpu.handle_problem}",
        "mode ring needs plain device memory and the same whole device in both containers (no MIG, no vGPU, no MPS "
        "with other users); without it: client-moved and streamed modes",
    )


def _descriptors(name: str, gpu: GpuFacts) -> Check:
    if not gpu.descriptor_problem:
        return ok(
            f"{name} descriptors", "another process maps this one's virtual memory: mode mapped, whatever the memory"
        )
    return warn(
        f"{name} descriptors",
        f"another process cannot map this one's virtual memory: {gpu.descriptor_problem}",
        "mode mapped alone needs it, for engines with virtual memory: let those be without it (expandable_segments, "
        "sleep mode), or use mode ring; else a runtime without a sandbox, and the same whole device in both containers",
    )


def _pinning(name: str, gpu: GpuFacts) -> Check:
    if not gpu.pinning_problem:
        return ok(f"{name} pinning", "the driver page-locks shared memory")
    return warn(
        f"{name} pinning",
        f"the driver does not page-lock shared memory: {gpu.pinning_problem}",
        "put l1.directory on a tmpfs, leave room under the memory limit, and use no sandboxed runtime; without it a "
        "mover ends and bytes are streamed",
    )


def _bandwidth(name: str, gpu: GpuFacts) -> Check:
    text = f"stores {gpu.store_bytes_per_s / 1e9:.1f} GB/s, loads {gpu.load_bytes_per_s / 1e9:.1f} GB/s, each alone"
    if min(gpu.store_bytes_per_s, gpu.load_bytes_per_s) >= SLOW_BYTES_PER_S:
        return ok(f"{name} bandwidth", text)
    return warn(
        f"{name} bandwidth",
        text,
        "look at the link (nvidia-smi -q -d PCIE: generation and width), at other load on it, and let the server's "
        "memory be on the GPU's NUMA node",
    )
