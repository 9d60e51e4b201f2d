# SPDX-License-Identifier: Apache-2.0
"""What a server's pod mounts: its configuration and key, the arena's memory, sockets."""

from typing import Any, Final

from kvpool_operator.desired import config_map, memory, names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.spec.pool import IpcMode, Pool

__all__ = ["mounts", "preparation", "volumes"]

_SHM: Final = "/dev/shm"  # noqa: S108 - the volume's place, not a file
_L1: Final = f"{_SHM}/kvpool"
"""As in the server's defaults; on the node one folder for all pools, whose files carry their pool's uid."""


def volumes(pool: Pool, facts: Facts) -> list[dict[str, Any]]:
    """The pod's volumes."""
    made: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": names.server_config(pool)}},
        {"name": "admin", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        _arena(pool),
    ]
    if config_map.serves_tcp(pool):
        secret = {"secretName": names.key_secret(pool, facts.server_key), "defaultMode": 0o440}
        made.append({"name": "key", "secret": secret})
    if _has_socket(pool):
        made.append({"name": "socket", "hostPath": {"path": names.host_folder(pool), "type": "DirectoryOrCreate"}})
    return made


def _arena(pool: Pool) -> dict[str, Any]:
    """Container: outlives a restarted container. Node: outlives the pod."""
    if _on_node(pool):
        return {"name": "l1", "hostPath": {"path": _L1, "type": "DirectoryOrCreate"}}
    return {"name": "l1", "emptyDir": {"medium": "Memory", "sizeLimit": str(memory.shm_bytes(pool))}}


def mounts(pool: Pool) -> list[dict[str, Any]]:
    """The server container's mounts."""
    made: list[dict[str, Any]] = [
        {"name": "config", "mountPath": config_map.CONFIG_FOLDER, "readOnly": True},
        {"name": "admin", "mountPath": config_map.ADMIN_FOLDER},
        {"name": "l1", "mountPath": _L1 if _on_node(pool) else _SHM},
    ]
    if config_map.serves_tcp(pool):
        made.append({"name": "key", "mountPath": config_map.KEY_FOLDER, "readOnly": True})
    if _has_socket(pool):
        made.append({"name": "socket", "mountPath": config_map.SOCKET_FOLDER})
    return made


def preparation(pool: Pool, image: str, user: int) -> dict[str, Any] | None:
    """The container that hands the node's folders to the server's user; the kubelet makes them for root alone."""
    folders = [_L1] * _on_node(pool) + [config_map.SOCKET_FOLDER] * _has_socket(pool)
    if not folders:
        return None
    wanted = {"l1": _L1, "socket": config_map.SOCKET_FOLDER}
    return {
        "name": "folders",
        "image": image,
        "command": ["install", "-d", "-m", "0755", "-o", str(user), "-g", str(user), *folders],
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "volumeMounts": [{"name": n, "mountPath": path} for n, path in wanted.items() if path in folders],
    }


def _on_node(pool: Pool) -> bool:
    return pool.spec.l1.persistence == "Node"


def _has_socket(pool: Pool) -> bool:
    return pool.spec.ipc.mode is IpcMode.HOST_PATH_SOCKET
