# SPDX-License-Identifier: Apache-2.0
"""Pure: whether servers see the GPUs of their nodes, and if not, why, and what to look at in the mode in use."""

from collections.abc import Mapping
from typing import Final

from kvpool_operator.observed import Observed
from kvpool_operator.spec.pool import GpuMode, Pool
from kvpool_operator.verdict import Finding

__all__ = ["gpu_access", "gpu_troubles"]

_FEWER: Final = "FewerGPUsThanNode"
_LOOK_AT: Final[Mapping[str, str]] = {
    GpuMode.RUNTIME_CLASS: "does that node's container toolkit accept NVIDIA_VISIBLE_DEVICES of unprivileged pods?",
    GpuMode.NRI: "does NVIDIA's toolkit run with its NRI plugin, and does NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES list "
    "the pool's namespace?",
    GpuMode.DRA: "does NVIDIA's DRA driver run there with GPUs enabled, and is the namespace labelled "
    "resource.kubernetes.io/admin-access=true?",
    GpuMode.PRIVILEGED: "is the NVIDIA driver loaded there?",
}
_ORDER: Final = ("NoGPUVisible", "DriverSilent", _FEWER, "MIGUnsupported")
"""What is told first if nodes differ."""


def gpu_troubles(seen: Observed) -> dict[str, str]:
    """Node to what is wrong with its GPUs in the server's eyes, where something is."""
    return {
        s.node: reason for s in seen.stats if (reason := _trouble(s.gpus, s.gpu_reason, seen.node_gpus.get(s.node)))
    }


def _trouble(gpus: int | None, reason: str, promised: int | None) -> str:
    if gpus is None:
        return ""
    if reason in _ORDER:
        return reason
    if not gpus:
        return "NoGPUVisible"
    return _FEWER if promised is not None and gpus < promised else ""


def gpu_access(pool: Pool, seen: Observed) -> Finding:
    """The condition GPUAccessReady."""
    if pool.spec.gpu_access.mode is GpuMode.NONE:
        return Finding("True", "NotNeeded", "the pool uses no GPUs")
    if seen.runtime_class_missing:
        return Finding("False", "RuntimeClassMissing", f"runtime class {seen.runtime_class_missing} does not exist")
    troubles = gpu_troubles(seen)
    for reason in _ORDER:
        if nodes := sorted(n for n, r in troubles.items() if r == reason):
            return Finding("False", reason, _told(reason, nodes, seen))
    counted = [s for s in seen.stats if s.gpus is not None]
    if not counted:
        return Finding("Unknown", "NotReported", "no server has said yet which GPUs it sees")
    return Finding("True", "GPUsVisible", f"{len(counted)} servers see their GPUs")


def _told(reason: str, nodes: list[str], seen: Observed) -> str:
    where = f"{len(nodes)} nodes, first {nodes[0]}"
    match reason:
        case "NoGPUVisible":
            return f"servers see no GPU on {where}; mode {seen.gpu_mode}: {_LOOK_AT.get(seen.gpu_mode, '')}".strip(": ")
        case "DriverSilent":
            return f"the NVIDIA driver does not answer on {where}"
        case "MIGUnsupported":
            return f"every GPU is cut into instances on {where}; bytes of their engines are streamed"
        case _:
            return f"servers see fewer GPUs than the node's label promises on {where}"
