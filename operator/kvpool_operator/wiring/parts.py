# SPDX-License-Identifier: Apache-2.0
"""What wiring adds to a pod: variables, volumes, mounts, the payload. Everything that the user wrote stays."""

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from kvpool import config
from kvpool_operator.desired import config_map, names
from kvpool_operator.spec.pool import Payload, Pool
from kvpool_operator.spec.quantity import Size
from kvpool_operator.wiring.reasons import Note, Skip

__all__ = [
    "CREDENTIALS_FOLDER",
    "PAYLOAD_FOLDER",
    "add_memory",
    "add_payload",
    "add_variables",
    "add_volumes",
    "variables",
]

CREDENTIALS: Final = "kvpool-credentials"
SOCKET: Final = "kvpool-socket"
PAYLOAD: Final = "kvpool-payload"
SHM: Final = "kvpool-shm"
PAYLOAD_FOLDER: Final = "/opt/kvpool"

CREDENTIALS_FOLDER: Final = config_map.TOKEN_FILE.rpartition("/")[0]
_SHM_FOLDER: Final = "/dev/shm"  # noqa: S108 - a mount's place, not a file
_TOKEN_S: Final = 3600
_GIB: Final = 1 << 30
_MOST_SHM: Final = 16 * _GIB
_USER: Final = 10001
"""User of the payload's image."""


def variables(client: config.ClientConfig) -> dict[str, str]:
    """Variables that make an engine's connector read *client*."""
    found: dict[str, str] = {}
    for name, value in msgspec.to_builtins(client).items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        found[f"{config.CLIENT_ENV_PREFIX}{name.upper()}"] = text
    return found


def add_variables(container: dict[str, Any], client: config.ClientConfig, extra: Iterable[str]) -> None:
    """Set what *container* does not set itself; *extra* are settings that stand in the connector's configuration."""
    theirs = {f"{config.CLIENT_ENV_PREFIX}{name.upper()}" for name in extra}
    wanted: list[dict[str, Any]] = [
        *({"name": n, "value": v} for n, v in variables(client).items()),
        _from_pod(f"{config.CLIENT_ENV_PREFIX}NODE", "spec.nodeName"),
        _from_pod(f"{config.CLIENT_ENV_PREFIX}LABEL", "metadata.name"),
        {"name": "PYTHONHASHSEED", "value": "0"},
    ]
    present = {e["name"] for e in container.get("env") or ()}
    new = [e for e in wanted if e["name"] not in present and e["name"] not in theirs]
    if new:
        container["env"] = [*(container.get("env") or ()), *new]


def _from_pod(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def add_volumes(pod: dict[str, Any], containers: Iterable[dict[str, Any]], pool: Pool, *, socket: bool) -> Skip | None:
    """Add the token and the server's key, and the folder with the socket, to *pod* and mount them."""
    volumes: list[tuple[dict[str, Any], str]] = []
    if config_map.serves_tcp(pool):
        sources = _credentials(pool, same_namespace=pod["metadata"].get("namespace") == pool.namespace)
        made = {"name": CREDENTIALS, "projected": {"defaultMode": 0o444, "sources": sources}}
        volumes.append((made, CREDENTIALS_FOLDER))
    if socket:
        folder = {"path": names.host_folder(pool), "type": "DirectoryOrCreate"}
        volumes.append(({"name": SOCKET, "hostPath": folder}, config_map.SOCKET_FOLDER))
    for volume, where in volumes:
        if not _add_volume(pod, volume):
            return Skip.NAME_TAKEN
        for container in containers:
            if not _add_mount(container, {"name": volume["name"], "mountPath": where, "readOnly": True}):
                return Skip.NAME_TAKEN
    return None


def _credentials(pool: Pool, *, same_namespace: bool) -> list[dict[str, Any]]:
    token = {"audience": names.audience(pool), "expirationSeconds": _TOKEN_S, "path": "token"}
    sources: list[dict[str, Any]] = [{"serviceAccountToken": token}]
    if same_namespace:  # no pod can mount what is in another one
        items = [{"key": config_map.SERVER_KEY, "path": config_map.SERVER_KEY}]
        sources.append({"configMap": {"name": names.client_config(pool), "items": items, "optional": True}})
        items = [{"key": config_map.SERVERS, "path": config_map.SERVERS}]
        sources.append({"configMap": {"name": names.server_config(pool), "items": items, "optional": True}})
    return sources


def add_memory(pod: dict[str, Any], containers: Iterable[dict[str, Any]]) -> None:
    """Give engines a ``/dev/shm`` of a useful size where the user gave none; the runtime's own has 64 MiB."""
    if pod["spec"].get("hostIPC"):
        return
    small = [c for c in containers if not _covers(c, _SHM_FOLDER)]
    if not small:
        return
    size = max(_shm_bytes(c) for c in small)
    if _add_volume(pod, {"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size >> 20}Mi"}}):
        for container in small:
            _add_mount(container, {"name": SHM, "mountPath": _SHM_FOLDER})


def _shm_bytes(container: Mapping[str, Any]) -> int:
    """1 GiB and another one for each GPU, but at most half of the memory that the container may use."""
    limits = (container.get("resources") or {}).get("limits") or {}
    wanted = min(_MOST_SHM, _GIB * (1 + _count(limits.get("nvidia.com/gpu", 0))))
    try:
        limit = Size.parse(limits["memory"])
    except (KeyError, ValueError):
        return wanted
    return max(64 << 20, min(wanted, limit // 2))


def _count(value: object) -> int:
    try:
        return max(0, int(Decimal(str(value))))
    except InvalidOperation:
        return 0


def _covers(container: Mapping[str, Any], folder: str) -> bool:
    """True if a mount of the user's is at *folder* or above it."""
    places = {str(m.get("mountPath", "")).rstrip("/") for m in container.get("volumeMounts") or ()}
    return folder in places or folder.rpartition("/")[0] in places


def add_payload(
    pod: dict[str, Any], containers: Iterable[dict[str, Any]], payload: Payload, image: str
) -> Note | Skip | None:
    """Bring the connector to images that do not have it."""
    by_copy = payload.mode == "InitContainer"
    source: dict[str, Any] = {"emptyDir": {"sizeLimit": "64Mi"}} if by_copy else {"image": _pulled(image, payload)}
    if not _add_volume(pod, {"name": PAYLOAD, **source}):
        return Skip.NAME_TAKEN
    note: Note | None = None
    for container in containers:
        mount = {"name": PAYLOAD, "mountPath": PAYLOAD_FOLDER, "readOnly": True}
        if not _add_mount(container, mount if by_copy else {**mount, "subPath": "payload"}):
            return Skip.NAME_TAKEN
        note = None if _add_to_path(container) else Note.PYTHONPATH_UNKNOWN
    if by_copy:
        _add_copier(pod, image, payload)
    return note


def _pulled(image: str, payload: Payload) -> dict[str, Any]:
    return {"reference": image, "pullPolicy": payload.pull_policy}


def _add_copier(pod: dict[str, Any], image: str, payload: Payload) -> None:
    """The init container; equal requests and limits, so that a Guaranteed pod stays one."""
    spec = pod["spec"]
    if any(c["name"] == PAYLOAD for c in spec.get("initContainers") or ()):
        return
    amounts = {"cpu": "100m", "memory": "64Mi"}
    copier = {
        "name": PAYLOAD,
        "image": image,
        "imagePullPolicy": payload.pull_policy,
        "args": [PAYLOAD_FOLDER],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": PAYLOAD, "mountPath": PAYLOAD_FOLDER}],
    }
    spec["initContainers"] = [*(spec.get("initContainers") or ()), copier]


def _add_to_path(container: dict[str, Any]) -> bool:
    """Put the payload behind what the user has on PYTHONPATH; False if that cannot be read."""
    env = container.get("env") or []
    for index, variable in enumerate(env):
        if variable["name"] != "PYTHONPATH":
            continue
        if "valueFrom" in variable:
            return False
        parts = [p for p in str(variable.get("value", "")).split(":") if p]
        if PAYLOAD_FOLDER not in parts:
            container["env"] = [*env]
            container["env"][index] = {"name": "PYTHONPATH", "value": ":".join([*parts, PAYLOAD_FOLDER])}
        return True
    container["env"] = [*env, {"name": "PYTHONPATH", "value": PAYLOAD_FOLDER}]
    return True


def _add_volume(pod: dict[str, Any], volume: dict[str, Any]) -> bool:
    """Add *volume*; False if another one has its name. What the API server fills in does not make it another."""
    volumes = pod["spec"].get("volumes") or []
    kind = next(key for key in volume if key != "name")
    for present in volumes:
        if present["name"] == volume["name"]:
            return kind in present
    pod["spec"]["volumes"] = [*volumes, volume]
    return True


def _add_mount(container: dict[str, Any], mount: dict[str, Any]) -> bool:
    """Add *mount*; False if something else is mounted there."""
    mounts = container.get("volumeMounts") or []
    for present in mounts:
        if str(present.get("mountPath", "")).rstrip("/") == mount["mountPath"]:
            return bool(present.get("name") == mount["name"])
    container["volumeMounts"] = [*mounts, mount]
    return True
