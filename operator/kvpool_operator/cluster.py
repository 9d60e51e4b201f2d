# SPDX-License-Identifier: Apache-2.0
"""The API server as the operator uses it: live reads, authoritative lists, server-side apply; its errors become ours.

The only door to the official client. Everything here runs on one event loop.
"""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from kvpool_operator import lean
from kvpool_operator.answers import error_of, message_of, undeclared
from kvpool_operator.errors import Absent, Busy, Conflict

__all__ = [
    "CHILDREN",
    "CHILD_MANAGER",
    "CONTROLLER_REVISIONS",
    "EVENTS",
    "HOOKS",
    "LEASES",
    "NODES",
    "PODS",
    "POOLS",
    "RUNTIME_CLASSES",
    "SECRETS",
    "STATUS_MANAGER",
    "Cluster",
    "Kind",
    "Listener",
]

CHILD_MANAGER: Final = "kvpool-operator"
STATUS_MANAGER: Final = "kvpool-operator-status"
BUNDLE_MANAGER: Final = "kvpool-webhook"
"""Field managers; never with a version or a pod's name in them, or fields would be held for ever."""

_PAGE: Final = 500
_REQUEST_S: Final = 30.0
_WATCH_S: Final = 300
_SILENCE: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=150.0)
"""A watch without any bookmark for this long is dead; they come about once a minute."""
_JSON: Final = "application/json"
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

_Page = tuple[Iterable[dict[str, Any]], str]
"""The objects of one answer of a list, and what to ask for the next one with; empty after the last."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object and its place in the API."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of a collection, an object, or a part of it."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        middle = f"/namespaces/{quote(namespace)}" if self.namespaced and namespace else ""
        end = (f"/{quote(name)}" if name else "") + (f"/{subresource}" if subresource else "")
        return f"{root}{middle}/{self.plural}{end}"


POOLS: Final = Kind("kvpool.dev/v1alpha1", "KVCachePool", "kvcachepools")
PODS: Final = Kind("v1", "Pod", "pods")
NODES: Final = Kind("v1", "Node", "nodes", namespaced=False)
SECRETS: Final = Kind("v1", "Secret", "secrets")
EVENTS: Final = Kind("events.k8s.io/v1", "Event", "events")
LEASES: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
HOOKS: Final = Kind(
    "admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", namespaced=False
)
RUNTIME_CLASSES: Final = Kind("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", namespaced=False)
CONTROLLER_REVISIONS: Final = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
CHILDREN: Final = {
    k.kind: k
    for k in (
        Kind("v1", "ConfigMap", "configmaps"),
        Kind("v1", "Service", "services"),
        Kind("apps/v1", "DaemonSet", "daemonsets"),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
        Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
        Kind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    )
}
"""Kinds of which a pool owns objects that are applied; its Secret is only ever created."""


class Listener(Protocol):
    """Is told of each call that ended."""

    def __call__(self, method: str, resource: str, status: int | None, seconds: float, /, *, trial: bool) -> None:
        """*resource* is the kind's plural, *status* None if no answer came, *trial* a call that changes nothing."""


def _silent(_method: str, _resource: str, _status: int | None, _seconds: float, *, trial: bool) -> None:
    """Nobody listens."""


class Cluster:
    """One connection to an API server; *listener* is told of each call."""

    def __init__(self, api: ApiClient, listener: Listener = _silent) -> None:
        self._api = api
        self._listener = listener

    async def apply(self, body: Mapping[str, Any], *, manager: str = CHILD_MANAGER, dry_run: bool = False) -> Any:
        """Apply *body*, one of a pool's children, and take over its fields; returns the stored object.

        Raises:
            Rejected, Forbidden, Busy, Conflict: see there.
            Absent: its kind or namespace does not exist.
        """
        kind, metadata = CHILDREN[body["kind"]], body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._apply(path, body, manager, dry_run=dry_run)

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Any:
        """Write the status of a pool, but for what an older CRD on the API server does not know.

        Raises:
            Absent: the pool is gone.
            Rejected, Forbidden, Busy, Conflict: see there.
        """
        known = dict(status)
        while True:
            body = {
                "apiVersion": POOLS.api_version,
                "kind": POOLS.kind,
                "metadata": {"name": name, "namespace": namespace},
                "status": known,
            }
            try:
                return await self._apply(POOLS.path(namespace, name, "status"), body, STATUS_MANAGER)
            except Busy as e:
                if (unknown := undeclared(str(e))) not in known:
                    raise
                del known[unknown]

    async def apply_bundle(self, name: str, hooks: Iterable[str], bundle: str) -> Any:
        """Publish *bundle* (base64 of PEM) for the named *hooks* of a webhook configuration, and nothing else of it.

        Raises:
            Absent, Rejected, Forbidden, Busy, Conflict: see there.
        """
        body = {
            "apiVersion": HOOKS.api_version,
            "kind": HOOKS.kind,
            "metadata": {"name": name},
            "webhooks": [{"name": hook, "clientConfig": {"caBundle": bundle}} for hook in hooks],
        }
        return await self._apply(HOOKS.path(name=name), body, BUNDLE_MANAGER)

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any], *, dry_run: bool = False) -> bool:
        """Create *body*; False if one of its name is there already.

        Raises:
            Rejected, Forbidden, Busy, Absent: see there.
        """
        query = {"fieldManager": CHILD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        try:
            await self._call("POST", kind.path(namespace), query, body=body)
        except Conflict:
            return False
        return True

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Any:
        """Write *body* over the version of it that was read.

        Raises:
            Conflict: somebody else wrote in between.
            Absent, Rejected, Forbidden, Busy: see there.
        """
        metadata = body["metadata"]
        return await self._call("PUT", kind.path(metadata.get("namespace", ""), metadata["name"]), {}, body=body)

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        """Read one object, live.

        Raises:
            Absent: there is none.
            Forbidden, Busy: see there.
        """
        return await self._call("GET", kind.path(namespace, name), {})

    async def read(self, path: str) -> str:
        """Read what is no object, such as the token issuer's keys.

        Raises:
            Absent, Forbidden, Busy: see there.
        """
        return await self._text("GET", path, {}, {"Accept": "application/json, */*"})

    async def snapshot(self, kind: Kind, namespace: str = "") -> tuple[list[dict[str, Any]], str]:
        """Read all objects of *kind*, and the version of the list, from which to watch.

        Raises:
            Absent: the kind does not exist.
            Forbidden, Busy: see there.
        """
        found = await self._call("GET", kind.path(namespace), {})
        return list(found.get("items") or ()), str(found["metadata"]["resourceVersion"])

    async def list(
        self, kind: Kind, namespace: str = "", labels: str = "", *, fields: str = "", metadata_only: bool = False
    ) -> list[dict[str, Any]]:
        """Read all objects of *kind* that *labels* and *fields* select, page by page, from the API server itself.

        Raises:
            Absent: the kind does not exist.
            Forbidden, Busy: see there; a list that grew stale half-way is Busy, too.
        """
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        accept = _METADATA_ONLY if metadata_only else _JSON
        return [item async for item in self._pages(kind.path(namespace), selectors, accept, _whole_page)]

    def each(self, kind: Kind, namespace: str = "", labels: str = "") -> AsyncIterator[dict[str, Any]]:
        """As `list`, for what there are thousands of: a page in memory, and of pods and nodes what `lean` keeps."""
        return self._pages(kind.path(namespace), {"labelSelector": labels}, _JSON, _lean_page)

    async def watch(self, kind: Kind, namespace: str, version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Changes of *kind* since *version*, each as its type and the object, until the API server ends the stream.

        Raises:
            Busy: the stream broke, was silent for too long, or *version* is too old; take a snapshot again.
            Forbidden: see there.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(_WATCH_S)
        call, headers = f"WATCH {kind.path(namespace)}", {"Accept": _JSON}
        try:
            answer = await self._send("GET", kind.path(namespace), query, headers, None, _SILENCE)
            if answer.status != HTTPStatus.OK:
                raise error_of(call, answer.status, await answer.read(), answer.headers)
            async with contextlib.AsyncExitStack() as ending:
                ending.callback(answer.response.close)
                async for line in answer.response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise Busy(f"{call}: {message_of(json.dumps(event['object']))}")
                    yield event["type"], event["object"]
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            raise Busy(f"{call}: {type(e).__name__}: {e}") from e

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, orphan: bool = False) -> bool:
        """Delete the object if it still is the one with *uid*; False if it is gone or another.

        With *orphan* what it owns stays, for a namesake to adopt.

        Raises:
            Forbidden, Busy: see there.
        """
        policy = "Orphan" if orphan else "Background"
        options = {"preconditions": {"uid": uid}, "propagationPolicy": policy}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self._call("DELETE", kind.path(namespace, name), {}, body=body)
        except (Absent, Conflict):
            return False
        return True

    async def evict(self, namespace: str, name: str, uid: str) -> bool:
        """Evict the pod if it still is the one with *uid*; False if it is gone or another.

        Raises:
            Forbidden: see there.
            Busy: see there; or a disruption budget does not allow it now.
        """
        options = {"preconditions": {"uid": uid}}
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        try:
            await self._call("POST", PODS.path(namespace, name, "eviction"), {}, body=body)
        except (Absent, Conflict):
            return False
        return True

    async def kinds(self, group_version: str) -> frozenset[str]:
        """Kinds that exist in *group_version*; none if the group does not.

        Raises:
            Forbidden, Busy: see there.
        """
        try:
            found = await self._call("GET", f"/apis/{group_version}", {})
        except Absent:
            return frozenset()
        return frozenset(r["kind"] for r in found["resources"] if "/" not in r["name"])

    async def _apply(self, path: str, body: Mapping[str, Any], manager: str, *, dry_run: bool = False) -> Any:
        query = {"fieldManager": manager, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        return await self._call("PATCH", path, query, body=body, content="application/apply-patch+yaml")

    async def _pages(
        self, path: str, selectors: Mapping[str, str], accept: str, read: Callable[[str], _Page]
    ) -> AsyncIterator[dict[str, Any]]:
        query = {"limit": str(_PAGE), **{name: text for name, text in selectors.items() if text}}
        while True:
            text = await self._text("GET", path, query, {"Accept": accept})
            try:
                items, following = read(text)
            except ValueError as e:
                raise Busy(f"GET {path}: {e}") from e
            for item in items:
                yield item
            if not following:
                return
            query["continue"] = following

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Mapping[str, Any] | None = None,
        content: str = _JSON,
    ) -> Any:
        return json.loads(await self._text(method, path, query, {"Content-Type": content, "Accept": _JSON}, body))

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: dict[str, str],
        body: Mapping[str, Any] | None,
        within: Any,
    ) -> Any:
        _, url, signed, _, _ = await self._api.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        signed["Accept-Encoding"] = "identity"  # packing long lists costs both sides more time than it saves here
        url += f"?{urlencode(query)}" if query else ""
        rest: Any = self._api.rest_client
        return await rest.request(method, url, headers=signed, body=body, _request_timeout=within)

    async def _text(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: dict[str, str],
        body: Mapping[str, Any] | None = None,
    ) -> str:
        call = f"{method} {path}"
        begun_s, status = time.monotonic(), None
        try:
            answer = await self._send(method, path, query, headers, body, _REQUEST_S)
            status = answer.status
            data: bytes = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise Busy(f"{call}: {type(e).__name__}: {e}") from e
        except ApiException as e:
            status = e.status
            raise error_of(call, e.status, e.body, e.headers) from e
        finally:
            self._listener(method, _resource(path), status, time.monotonic() - begun_s, trial="dryRun" in query)
        if not 200 <= status <= 299:  # noqa: PLR2004 - the statuses that mean success
            raise error_of(call, status, data, answer.headers)
        return data.decode()


def _resource(path: str) -> str:
    """Plural of the kind that *path* is about; empty for what is no object."""
    root, *rest = path.strip("/").split("/")
    parts = {"api": rest[1:], "apis": rest[2:]}.get(root, [])
    if parts[:1] == ["namespaces"] and len(parts) > 2:  # noqa: PLR2004 - a namespace, and something in it
        parts = parts[2:]
    return parts[0] if parts else ""


def _whole_page(text: str) -> _Page:
    body = json.loads(text)
    return body.get("items") or (), body["metadata"].get("continue", "")


def _lean_page(text: str) -> _Page:
    found = lean.page(text)
    return map(lean.raw, found.items or ()), found.following
