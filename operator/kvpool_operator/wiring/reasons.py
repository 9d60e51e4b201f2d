# SPDX-License-Identifier: Apache-2.0
"""Why a pod is not wired, or what of it is left to a person: two closed sets, each member with its remedy in words."""

from enum import StrEnum
from typing import Final

__all__ = ["BY_HAND", "FLAG", "REMEDIES", "Note", "Skip"]

FLAG: Final = (
    "--kv-transfer-config '"
    '{"kv_connector":"KVPoolConnector","kv_connector_module_path":"kvpool.connector.facade",'
    '"kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
    "'"
)
"""What a person adds to a command line that is not rewritten; the same on every node."""


class Skip(StrEnum):
    """Nothing of the pod was changed but its annotation."""

    NO_POOL_NAMED = "NoPoolNamed"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    POOL_NOT_READY = "PoolNotReady"
    CONTAINER_NOT_FOUND = "ContainerNotFound"
    CONTAINER_UNCLEAR = "ContainerUnclear"
    SOCKET_FORBIDDEN = "SocketForbidden"
    NAME_TAKEN = "NameTaken"
    MALFORMED = "Malformed"


class Note(StrEnum):
    """The pod is wired, and a person should know something."""

    POOL_NOT_FOUND = "PoolNotFound"
    SHELL_COMMAND = "ShellCommand"
    RAY = "Ray"
    LEADER_WORKER_SET = "LeaderWorkerSet"
    UNKNOWN_COMMAND = "UnknownCommand"
    IMAGE_COMMAND = "ImageCommand"
    FOREIGN_CONNECTOR = "ForeignConnector"
    UNREADABLE_CONNECTOR = "UnreadableConnector"
    STREAMED_INSTEAD = "StreamedInstead"
    PYTHONPATH_UNKNOWN = "PythonPathUnknown"
    PAYLOAD_SKEW = "PayloadSkew"
    CONNECTOR_MISSING = "ConnectorMissing"
    HOST_NAMES = "HostNames"


_ADD: Final = "add the flag below by hand"
BY_HAND: Final = frozenset(
    {Note.SHELL_COMMAND, Note.RAY, Note.LEADER_WORKER_SET, Note.UNKNOWN_COMMAND, Note.IMAGE_COMMAND}
)
"""Notes that a person settles with FLAG."""

REMEDIES: Final[dict[Skip | Note, str]] = {
    Skip.NO_POOL_NAMED: "the label kvpool.dev/pool names no pool; write the pool's name as its value",
    Skip.NAMESPACE_NOT_ALLOWED: "the pool does not allow this namespace; add it to its clients.allowedNamespaces",
    Skip.POOL_NOT_READY: "the pool of another namespace does not exist or has no key yet; create the pod again once "
    "the pool is there (clients.rewireUnwired does it)",
    Skip.CONTAINER_NOT_FOUND: "the annotation kvpool.dev/container names a container that the pod does not have",
    Skip.CONTAINER_UNCLEAR: "none of several containers looks like vLLM; name it in annotation kvpool.dev/container",
    Skip.SOCKET_FORBIDDEN: "the pool is reached over its socket alone, and this namespace enforces a level that "
    "forbids host folders; use a namespace at the Privileged level or network.auth ServiceAccountToken",
    Skip.NAME_TAKEN: "the pod has a volume or a mount of its own where wiring needs one; rename or move it",
    Skip.MALFORMED: "the pod cannot be read; the API server will say what is wrong with it",
    Note.POOL_NOT_FOUND: "no such pool yet; the engine runs uncached until there is one",
    Note.SHELL_COMMAND: f"the command is a shell line, which is not rewritten; {_ADD}",
    Note.RAY: f"Ray starts the engine, its command is not in this pod; {_ADD}",
    Note.LEADER_WORKER_SET: f"the command of a LeaderWorkerSet is not rewritten; {_ADD}",
    Note.UNKNOWN_COMMAND: f"the command is none of vLLM's that is known; {_ADD}",
    Note.IMAGE_COMMAND: f"the image's own command is not in this pod; {_ADD}",
    Note.FOREIGN_CONNECTOR: "another connector is configured and was left alone; combine both with MultiConnector",
    Note.UNREADABLE_CONNECTOR: "the value of --kv-transfer-config is no readable JSON and was left alone; see that it "
    "names KVPoolConnector",
    Note.STREAMED_INSTEAD: "this namespace enforces a level that forbids host folders, so bytes are streamed over TCP, "
    "which is slower than the socket",
    Note.PYTHONPATH_UNKNOWN: "PYTHONPATH comes from elsewhere and was left alone; add /opt/kvpool to it by hand",
    Note.HOST_NAMES: "the pod has the host's network and so the host's name service, which knows no Services; set its "
    "dnsPolicy to ClusterFirstWithHostNet",
    Note.CONNECTOR_MISSING: "vLLM's published image has no connector and the pool brings none: the engine will not "
    "start; set the pool's clients.payload, or the pod's annotation kvpool.dev/payload: none if the image has it",
    Note.PAYLOAD_SKEW: "the payload is more than one minor version away from the operator; use one that is closer",
}
