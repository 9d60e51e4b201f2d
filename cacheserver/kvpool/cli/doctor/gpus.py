# SPDX-License-Identifier: Apache-2.0
"""What can be done with each NVIDIA GPU, tried in a process of its own: a driver that hangs costs that one."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvpool.cli.doctor.facts import GpuFacts, GpusFacts
from kvpool.cli.doctor.probe import Probed, last_words
from kvpool.transfer.mover.inventory import Gpu, InventoryError, visible_gpus

__all__ = ["gpus_facts", "probe_in_child"]

PROBE_S: Final = 60.0
_DEVICE_FILE: Final = Path("/dev/nvidiactl")


def gpus_facts(
    directory: str,
    look: Callable[[], Sequence[Gpu]] = visible_gpus,
    probe: Callable[[str, str], Probed] | None = None,
    device_file: Path = _DEVICE_FILE,
) -> GpusFacts:
    """Look at all GPUs that this process may see.

    Args:
        directory: a folder on the memory that the arena would be on.
        look: returns the devices, or raises InventoryError.
        probe: tries out the device of that UUID with memory in that folder.
        device_file: exists where a driver's devices were handed to this container.
    """
    try:
        found = look()
    except InventoryError as e:
        return GpusFacts(problem=str(e), device_files=device_file.exists())
    gpus = tuple(_facts(gpu, directory, probe or probe_in_child) for gpu in found)
    return GpusFacts(gpus=gpus, device_files=device_file.exists())


def _facts(gpu: Gpu, directory: str, probe: Callable[[str, str], Probed]) -> GpuFacts:
    probed = Probed() if gpu.mig else probe(gpu.uuid, directory)
    return GpuFacts(
        name=gpu.name,
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.free_bytes,
        mig=gpu.mig,
        problem=probed.problem,
        handle_problem=probed.handle,
        descriptor_problem=probed.descriptors,
        pinning_problem=probed.pinning,
        store_bytes_per_s=probed.store_bytes_per_s,
        load_bytes_per_s=probed.load_bytes_per_s,
    )


def probe_in_child(uuid: str, directory: str) -> Probed:
    """Try out one device; whatever goes wrong is the answer."""
    command = [sys.executable, "-m", "kvpool.cli.doctor.probe", "try", uuid, directory]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)  # noqa: S603 - our own program
    except subprocess.TimeoutExpired:
        return Probed(problem=f"the driver did not answer within {PROBE_S:.0f} s")
    except OSError as e:
        return Probed(problem=str(e))
    try:
        return msgspec.json.decode(done.stdout, type=Probed)
    except msgspec.MsgspecError:
        return Probed(problem=f"its trial ended with {done.returncode}: {last_words(done) or 'without a word'}")
