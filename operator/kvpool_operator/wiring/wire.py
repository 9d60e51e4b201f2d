# SPDX-License-Identifier: Apache-2.0
"""One pod, whole: which pool, which containers, what is added. Wiring twice is wiring once."""

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvpool import config
from kvpool._version import __version__
from kvpool_operator.desired import config_map, names
from kvpool_operator.spec.pool import L1, Clients, IpcMode, Payload, Pool, PoolSpec
from kvpool_operator.spec.quantity import Size
from kvpool_operator.wiring import connector, parts
from kvpool_operator.wiring.command import Program, invocation
from kvpool_operator.wiring.containers import is_leader_worker_set, is_ray, targets
from kvpool_operator.wiring.patch import Operation, difference
from kvpool_operator.wiring.reasons import BY_HAND, FLAG, REMEDIES, Note, Skip

__all__ = ["Outcome", "Situation", "wanted_pool", "wire", "wiring_mark"]

POOL_NAMESPACE: Final = "kvpool.dev/pool-namespace"
PAYLOAD: Final = "kvpool.dev/payload"

_VERSION: Final = re.compile(r":v?(\d+)\.(\d+)(\.|-|$)")
_PUBLISHED: Final = re.compile(r"(^|/)vllm/vllm-openai([:@]|$)")
_LEFT_ALONE: Final = {
    Program.SHELL: Note.SHELL_COMMAND,
    Program.RAY: Note.RAY,
    Program.IMAGE: Note.IMAGE_COMMAND,
    Program.OTHER: Note.UNKNOWN_COMMAND,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known besides the pod."""

    namespace: str
    """The pod's."""
    pool: Pool | None
    """None: there is none of that name."""
    server_key: str = ""
    """The pool's public key; empty before there is one."""
    host_folders: bool = False
    """True if the pod's namespace lets pods mount folders of the node."""
    payload_image: str = ""
    """Of pools that name none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to do with the pod, and what to say about it."""

    patch: tuple[Operation, ...]
    skip: Skip | None = None
    notes: tuple[Note, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """For whoever made the pod; each stands for itself, and is short enough to be shown whole."""
        reasons: Iterable[Skip | Note] = (self.skip,) if self.skip else self.notes
        texts = tuple(f"kvpool: {r}: {REMEDIES[r]}" for r in reasons)
        return (*texts, f"kvpool: {FLAG}") if BY_HAND & set(self.notes) else texts


def wanted_pool(pod: Mapping[str, Any], namespace: str) -> tuple[str, str]:
    """Namespace and name of the pool that *pod* of *namespace* asks for; no name if it names none."""
    metadata = pod.get("metadata") or {}
    other = (metadata.get("annotations") or {}).get(POOL_NAMESPACE) or namespace
    return other, (metadata.get("labels") or {}).get(names.POOL_LABEL) or ""


def wiring_mark(pool: Pool, server_key: str, namespace: str) -> str:
    """What a wired pod of *namespace* is marked with; another mark means that the pool has moved since.

    It is made of what stands here and of nothing that a new version of the operator could make differently: all pods
    would be out of date after an upgrade.
    """
    far = server_key if namespace != pool.namespace else ""
    client = config_map.client_config(pool, server_key)
    reach = (client.server, pool.spec.network.port, config_map.serves_tcp(pool), names.audience(pool), far)
    return hashlib.sha256(repr(reach).encode()).hexdigest()[:12]


def wire(pod: Mapping[str, Any], known: Situation) -> Outcome:
    """Wire *pod*, as far as that is possible. Never fails."""
    try:
        return _wire(pod, known)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return Outcome((), Skip.MALFORMED)


def _wire(pod: Mapping[str, Any], known: Situation) -> Outcome:
    pool = known.pool or _expected(wanted_pool(pod, known.namespace))
    made: dict[str, Any] = copy.deepcopy(dict(pod))
    made["metadata"].setdefault("namespace", known.namespace)
    result = _refused(known, pool) or _changed(made, known, pool)
    if "namespace" not in pod["metadata"]:
        del made["metadata"]["namespace"]
    if isinstance(result, Skip):
        untouched = copy.deepcopy(dict(pod))
        _mark(untouched, "", str(result))
        return Outcome(tuple(difference(pod, untouched)), result)
    _mark(made, wiring_mark(pool, known.server_key, known.namespace), ",".join(result) or "Complete")
    return Outcome(tuple(difference(pod, made)), None, result)


def _expected(key: tuple[str, str]) -> Pool:
    """The pool that may come: all names follow from its own, the rest are defaults.

    It may bring the connector. Brought in vain it does no harm; without it an image that has none would not start.
    """
    spec = PoolSpec(l1=L1(size=Size(1 << 30)), clients=Clients(payload=Payload()))
    return Pool(name=key[1], namespace=key[0], uid="", generation=0, spec=spec)


def _refused(known: Situation, pool: Pool) -> Skip | None:
    if not pool.name:
        return Skip.NO_POOL_NAMED
    if pool.namespace == known.namespace:
        return None
    if known.pool is None or (config_map.serves_tcp(pool) and not known.server_key):
        return Skip.POOL_NOT_READY
    return None if pool.admits(known.namespace) else Skip.NAMESPACE_NOT_ALLOWED


def _changed(pod: dict[str, Any], known: Situation, pool: Pool) -> tuple[Note, ...] | Skip:
    """Change *pod* in place; after a Skip it is not to be used."""
    found = targets(pod)
    if isinstance(found, Skip):
        return found
    socket = pool.spec.ipc.mode is IpcMode.HOST_PATH_SOCKET
    notes: list[Note | None] = [Note.POOL_NOT_FOUND if known.pool is None else None]
    if socket and not known.host_folders:
        if not config_map.serves_tcp(pool):
            return Skip.SOCKET_FORBIDDEN
        socket = False
        notes.append(Note.STREAMED_INSTEAD)
    notes.append(None if socket or _knows_services(pod["spec"]) else Note.HOST_NAMES)
    containers = [pod["spec"]["containers"][index] for index in found]
    labels = pod["metadata"].get("labels") or {}
    client = _client(known, pool, socket=socket)
    said = [_configure(container, labels, client, pool) for container in containers]
    notes += [*said, _missing(pod, pool, [c for c, note in zip(containers, said, strict=True) if note is None])]
    if (taken := parts.add_volumes(pod, containers, pool, socket=socket)) is not None:
        return taken
    parts.add_memory(pod, containers)
    if isinstance(brought := _bring(pod, containers, known, pool), Skip):
        return brought
    return tuple(dict.fromkeys(n for n in [*notes, *brought] if n is not None))


def _knows_services(spec: Mapping[str, Any]) -> bool:
    """False if names of Services mean nothing to the pod. ``ClusterFirst`` is another word for that on the host's."""
    return not spec.get("hostNetwork") or spec.get("dnsPolicy") in ("ClusterFirstWithHostNet", "None")


def _client(known: Situation, pool: Pool, *, socket: bool) -> config.ClientConfig:
    """The client's configuration as this very pod needs it."""
    near = known.namespace == pool.namespace
    client = config_map.client_config(pool, "" if near else known.server_key, socket=socket)
    if not near or not config_map.serves_tcp(pool):
        return client
    folder = parts.CREDENTIALS_FOLDER
    files = {"server_key_file": f"{folder}/{config_map.SERVER_KEY}", "servers_file": f"{folder}/{config_map.SERVERS}"}
    return msgspec.structs.replace(client, **files)


def _configure(
    container: dict[str, Any], labels: Mapping[str, str], client: config.ClientConfig, pool: Pool
) -> Note | None:
    """Change *container* in place."""
    how = invocation(container)
    given = connector.find(container, how)
    parts.add_variables(container, client, given.extra if given else ())
    policy = pool.spec.clients.load_failure_policy
    if given is not None:
        connector.complete(container, given, policy)
        return given.note
    if is_ray(labels):
        return Note.RAY
    if how.program is not Program.ENGINE:
        return _LEFT_ALONE[how.program]
    if is_leader_worker_set(labels):
        return Note.LEADER_WORKER_SET
    container[how.tail] = [*container[how.tail], *connector.flag(policy)]
    return None


def _bring(
    pod: dict[str, Any], containers: list[dict[str, Any]], known: Situation, pool: Pool
) -> list[Note | None] | Skip:
    payload = pool.spec.clients.payload
    if payload is None or _declines(pod):
        return []
    image = payload.image or known.payload_image
    result = parts.add_payload(pod, containers, payload, image)
    return result if isinstance(result, Skip) else [result, Note.PAYLOAD_SKEW if _far_apart(image) else None]


def _declines(pod: Mapping[str, Any]) -> bool:
    """True if the pod says that its image has the connector."""
    return bool((pod["metadata"].get("annotations") or {}).get(PAYLOAD) == "none")


def _missing(pod: Mapping[str, Any], pool: Pool, containers: Iterable[Mapping[str, Any]]) -> Note | None:
    """A note if one of *containers*, whose engines are told to use the connector, cannot have it."""
    if pool.spec.clients.payload is not None or _declines(pod):
        return None
    return Note.CONNECTOR_MISSING if any(_PUBLISHED.search(str(c.get("image"))) for c in containers) else None


def _far_apart(image: str) -> bool:
    """True if the image's tag is a version that this release is not made to work with."""
    found = _VERSION.search(image.partition("@")[0].rpartition("/")[2])
    if found is None:
        return False
    major, minor = (int(part) for part in __version__.split(".")[:2])
    return int(found[1]) != major or abs(int(found[2]) - minor) > 1


def _mark(pod: dict[str, Any], mark: str, text: str) -> None:
    annotations = dict(pod["metadata"].get("annotations") or {})
    annotations.pop(names.WIRED, None)
    if mark:
        annotations[names.WIRED] = mark
    annotations[names.WIRING] = text
    pod["metadata"]["annotations"] = annotations
