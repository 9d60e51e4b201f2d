# SPDX-License-Identifier: Apache-2.0
"""How a server pod sees the node's GPUs without claiming them, and how it keeps away while their driver is replaced."""

from typing import Any, Final

from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.spec.parse import dump
from kvpool_operator.spec.placement import Affinity
from kvpool_operator.spec.pool import GpuMode, Pool

__all__ = [
    "DRIVER_STATES_AWAY",
    "DRIVER_STATE_LABEL",
    "affinity",
    "annotations",
    "claim_template",
    "env",
    "has_gpus",
    "mode_in_use",
    "pod_fields",
    "runtime_class",
]

DRIVER_STATE_LABEL: Final = "nvidia.com/gpu-driver-upgrade-state"
DRIVER_STATES_AWAY: Final = (
    "pod-deletion-required",
    "drain-required",
    "node-maintenance-required",
    "post-maintenance-required",
    "pod-restart-required",
    "upgrade-failed",
)
"""States of a driver upgrade in which nothing may hold the driver. The DaemonSet controller itself takes a pod away
when its node stops matching, and brings it back when it matches again: nobody has to watch nodes for this."""


def mode_in_use(pool: Pool, facts: Facts) -> GpuMode:
    """What Auto comes to: the RuntimeClass if there is one, else the annotation. Never a privileged pod."""
    mode = pool.spec.gpu_access.mode
    if mode is not GpuMode.AUTO:
        return mode
    return GpuMode.RUNTIME_CLASS if runtime_class(pool) in facts.runtime_classes else GpuMode.NRI


def has_gpus(pool: Pool) -> bool:
    """True unless the pool says that its nodes have none."""
    return pool.spec.gpu_access.mode is not GpuMode.NONE


def pod_fields(pool: Pool, mode: GpuMode) -> dict[str, Any]:
    """Fields of the pod that *mode* needs."""
    match mode:
        case GpuMode.RUNTIME_CLASS:
            return {"runtimeClassName": runtime_class(pool)}
        case GpuMode.DRA:
            return {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": names.claim_template(pool)}]}
        case _:
            return {}


def annotations(mode: GpuMode) -> dict[str, str]:
    """Annotations of the pod that *mode* needs: the management device carries all GPUs and claims none."""
    if mode is GpuMode.NRI:
        return {"nvidia.cdi.k8s.io/container.server": "management.nvidia.com/gpu=all"}
    return {}


def env(mode: GpuMode) -> list[dict[str, Any]]:
    """Variables that NVIDIA's container toolkit reads; more capabilities than these are not needed."""
    if mode in (GpuMode.NONE, GpuMode.DRA):
        return []
    return [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
    ]


def claim_template(pool: Pool) -> dict[str, Any]:
    """A claim on all GPUs of the node with admin access, which takes none from anybody."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": names.metadata(pool, names.claim_template(pool)),
        "spec": {
            "spec": {
                "devices": {
                    "requests": [
                        {
                            "name": "gpus",
                            "exactly": {
                                "deviceClassName": "gpu.nvidia.com",
                                "allocationMode": "All",
                                "adminAccess": True,
                            },
                        }
                    ]
                }
            }
        },
    }


def affinity(pool: Pool) -> dict[str, Any]:
    """The user's node affinity, and on GPU nodes the condition that no driver upgrade needs the node empty."""
    wanted = pool.spec.placement.affinity or Affinity()
    plain: dict[str, Any] = _without_empty(dump(wanted))
    if not has_gpus(pool):
        return plain
    node = plain.setdefault("nodeAffinity", {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = node.get(required, {}).get("nodeSelectorTerms", [{}])
    node[required] = {"nodeSelectorTerms": [_and_driver_at_rest(t) for t in terms]}
    return plain


def _and_driver_at_rest(term: dict[str, Any]) -> dict[str, Any]:
    at_rest = {"key": DRIVER_STATE_LABEL, "operator": "NotIn", "values": list(DRIVER_STATES_AWAY)}
    return {"matchExpressions": [*term.get("matchExpressions", []), at_rest]}


def runtime_class(pool: Pool) -> str:
    """Name of the class that the pool wants, whether it exists or not."""
    return pool.spec.gpu_access.runtime_class_name or "nvidia"


def _without_empty(value: Any) -> Any:
    """*value* without null and empty fields: server-side apply sends only what it means."""
    if isinstance(value, dict):
        return {k: _without_empty(v) for k, v in value.items() if v not in (None, [], {})}
    if isinstance(value, list):
        return [_without_empty(v) for v in value]
    return value
