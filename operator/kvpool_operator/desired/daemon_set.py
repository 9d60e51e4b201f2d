# SPDX-License-Identifier: Apache-2.0
"""The DaemonSet of a pool's servers."""

from typing import Any, Final

from kvpool_operator.desired import config_map, gpu, memory, names, services
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.provision import digest_of, provisioned_bytes, with_size
from kvpool_operator.desired.volumes import mounts, preparation, volumes
from kvpool_operator.spec.parse import dump
from kvpool_operator.spec.pool import GpuMode, Pool, Strategy

__all__ = ["USER", "daemon_set"]

USER: Final = 10001
"""User and group id of the server in its image."""
_GRACE_S: Final = 60
_PROBE_S: Final = 5


def daemon_set(pool: Pool, facts: Facts) -> dict[str, Any]:
    """One server on each chosen node."""
    shape = digest_of(_template(with_size(pool, 0), facts))
    l1_bytes = provisioned_bytes(pool, facts.provision, shape)
    made: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": names.metadata(pool, names.daemon_set(pool)),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(pool)},
            "updateStrategy": _update_strategy(pool),
            "minReadySeconds": 5,
            "template": _template(with_size(pool, l1_bytes), facts),
        },
    }
    made["metadata"]["annotations"] = {names.L1_PROVISIONED: str(l1_bytes), names.TEMPLATE: shape}
    if config_map.serves_tcp(pool):
        made["metadata"]["annotations"][names.SERVER_KEY] = facts.server_key
    return made


def _template(pool: Pool, facts: Facts) -> dict[str, Any]:
    return {"metadata": _pod_metadata(pool, facts), "spec": _pod(pool, facts)}


def _update_strategy(pool: Pool) -> dict[str, Any]:
    """Never a surge: two arenas would be held on one node."""
    update = pool.spec.update
    if update.strategy is Strategy.ROLLING_UPDATE:
        return {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": update.max_unavailable, "maxSurge": 0}}
    return {"type": "OnDelete"}


def _pod_metadata(pool: Pool, facts: Facts) -> dict[str, Any]:
    own = pool.spec.pod_metadata
    return {
        "labels": {**own.labels, **names.labels(pool)},
        "annotations": {
            **own.annotations,
            **gpu.annotations(gpu.mode_in_use(pool, facts)),
            names.CONFIG_HASH: config_map.config_hash(pool, facts),
        },
    }


def _pod(pool: Pool, facts: Facts) -> dict[str, Any]:
    mode = gpu.mode_in_use(pool, facts)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": _pod_security(),
        "containers": [_server(pool, facts, mode)],
        "volumes": volumes(pool, facts),
        **_placement(pool, facts),
        **gpu.pod_fields(pool, mode),
    }
    if prepare := preparation(pool, _image(pool, facts), USER):
        pod["initContainers"] = [prepare]
    if secrets := pool.spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": s.name} for s in secrets]
    return pod


def _placement(pool: Pool, facts: Facts) -> dict[str, Any]:
    placement = pool.spec.placement
    optional = {
        "nodeSelector": dict(placement.node_selector),
        "affinity": gpu.affinity(pool),
        "tolerations": [{k: v for k, v in dump(t).items() if v not in (None, "")} for t in placement.tolerations],
        "priorityClassName": placement.priority_class_name or facts.priority_class,
    }
    return {name: value for name, value in optional.items() if value}


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _server(pool: Pool, facts: Facts, mode: GpuMode) -> dict[str, Any]:
    server: dict[str, Any] = {
        "name": "server",
        "image": _image(pool, facts),
        "args": ["server", "--config", f"{config_map.CONFIG_FOLDER}/server.json"],
        "env": [
            _node_name(),
            _most_l1(pool),
            *gpu.env(mode),
            *({"name": e.name, "value": e.value} for e in pool.spec.env),
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in sorted(services.ports(pool).items())
        ],
        "resources": memory.resources(pool),
        "securityContext": _security(mode),
        "volumeMounts": mounts(pool),
        **_probes(pool),
    }
    if mode is GpuMode.DRA:
        server["resources"]["claims"] = [{"name": "gpus"}]
    return server


def _most_l1(pool: Pool) -> dict[str, Any]:
    """How far a server may grow while it runs: it belongs to the pod, not to the file that pods of all ages mount."""
    return {"name": "KVPOOL_SERVER__L1__MAX_BYTES", "value": str(int(pool.spec.l1.size))}


def _node_name() -> dict[str, Any]:
    return {"name": "KVPOOL_SERVER__SERVER_ID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def _security(mode: GpuMode) -> dict[str, Any]:
    """As little as the Restricted level asks for, but for the mode whose very point is a privileged pod."""
    if mode is GpuMode.PRIVILEGED:
        return {"privileged": True, "readOnlyRootFilesystem": True}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probes(pool: Pool) -> dict[str, Any]:
    """Start-up gets the time that touching the arena can take; a slow loop is not killed at once."""
    return {
        "startupProbe": _probe("/live", _PROBE_S, memory.startup_s(pool) // _PROBE_S),
        "livenessProbe": _probe("/live", 10, 6),
        "readinessProbe": _probe("/ready", _PROBE_S, 2),
    }


def _probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "operations"},
        "periodSeconds": period_s,
        "timeoutSeconds": 4,
        "failureThreshold": failures,
    }


def _image(pool: Pool, facts: Facts) -> str:
    return pool.spec.image or facts.image
