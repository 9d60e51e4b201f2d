# SPDX-License-Identifier: Apache-2.0
"""Every kopf decorator. Each handler only names a pool to the queue; what to do is found out from the API server.

Events alone: no diffs, no finalizers, no annotations of kopf's. What kopf believes to exist is a hint, never the truth.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import kopf

from kvpool_operator.desired.names import POOL_LABEL, ROLE_LABEL
from kvpool_operator.kept import EVERYTHING, Part
from kvpool_operator.queue import Need
from kvpool_operator.reconcile import Key
from kvpool_operator.settings import Settings

__all__ = ["Stop", "StuckError", "Watcher", "configure", "operate"]

_SERVERS: Final[Any] = {POOL_LABEL: kopf.PRESENT, ROLE_LABEL: "server"}
_POOLS: Final = ("kvpool.dev", "v1alpha1", "kvcachepools")
_END_S: Final = 15.0
"""How long kopf may take to end; it grants its handlers five seconds."""

_CANCELLED_S: Final = 2.0


class StuckError(RuntimeError):
    """kopf was to end and did not."""


@dataclass(slots=True)
class Watcher:
    """What handlers share; used on the watches' thread.

    Args:
        ask: puts a pool into the queue and says what of it changed, from any thread.
    """

    ask: Callable[[Key, Need, Part], None]
    _generations: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _daemon_sets: dict[str, str] = field(default_factory=dict)
    """By uid, all that changes more seldom than their status."""

    def forget(self) -> None:
        """Start as if nothing had been seen."""
        self._generations.clear()
        self._daemon_sets.clear()

    def pool_seen(self, metadata: Mapping[str, Any], *, deleted: bool) -> None:
        """A pool came, changed or went. A change of its status alone is our own and asks for nothing."""
        key = metadata["namespace"], metadata["name"]
        version = metadata["uid"], metadata.get("generation", 0)
        if deleted:
            self._generations.pop(key, None)
        elif self._generations.get(key) == version:
            return
        else:
            self._generations[key] = version
        self.ask(key, Need.NOW, EVERYTHING)

    def owned_seen(self, metadata: Mapping[str, Any]) -> None:
        """Something that a pool owns came, changed or went."""
        self.ask(_pool_of(metadata), Need.SOON, Part.CHILDREN)

    def server_seen(self, metadata: Mapping[str, Any]) -> None:
        """A server's pod came, changed or went."""
        self.ask(_pool_of(metadata), Need.SOMETIME, Part.SERVERS)

    def daemon_set_seen(self, metadata: Mapping[str, Any], *, deleted: bool) -> None:
        """A DaemonSet came, changed or went; its status, which counts servers, changes with each of them."""
        uid, made = metadata["uid"], _but_status(metadata)
        known = self._daemon_sets.pop(uid, None)
        if not deleted:
            self._daemon_sets[uid] = made
        same = known == made and not deleted
        need, part = (Need.SOMETIME, Part.SERVERS) if same else (Need.SOON, Part.SERVERS | Part.CHILDREN)
        self.ask(_pool_of(metadata), need, part)

    def client_seen(self, metadata: Mapping[str, Any]) -> None:
        """A pod that opted in; its pool may be in any namespace that knows its name."""
        name = metadata["labels"][POOL_LABEL]
        for key in [k for k in self._generations if k[1] == name]:
            self.ask(key, Need.SOMETIME, Part.CLIENTS)


def _pool_of(metadata: Mapping[str, Any]) -> Key:
    return metadata["namespace"], metadata["labels"][POOL_LABEL]


def _but_status(metadata: Mapping[str, Any]) -> str:
    """Differs when somebody changed more than the status. Labels and annotations do not move a generation."""
    parts = ("generation", "labels", "annotations", "ownerReferences")
    return json.dumps([metadata.get(p) for p in parts], sort_keys=True, default=dict)


@kopf.on.event(*_POOLS)
async def on_pool(memo: Watcher, meta: Mapping[str, Any], type: str | None, **_: Any) -> None:  # noqa: A002
    """A pool changed."""
    memo.pool_seen(meta, deleted=type == "DELETED")


@kopf.on.event("apps", "v1", "daemonsets", labels=_SERVERS)
async def on_daemon_set(memo: Watcher, meta: Mapping[str, Any], type: str | None, **_: Any) -> None:  # noqa: A002
    """A DaemonSet changed, or its status."""
    memo.daemon_set_seen(meta, deleted=type == "DELETED")


@kopf.on.event("v1", "configmaps", labels=_SERVERS)
@kopf.on.event("v1", "services", labels=_SERVERS)
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies", labels=_SERVERS)
async def on_owned(memo: Watcher, meta: Mapping[str, Any], **_: Any) -> None:
    """Something that a pool owns changed."""
    memo.owned_seen(meta)


@kopf.on.event("v1", "pods", labels={POOL_LABEL: kopf.PRESENT})
async def on_pod(memo: Watcher, meta: Mapping[str, Any], **_: Any) -> None:
    """A server, or a pod that opted in, changed."""
    if meta["labels"].get(ROLE_LABEL) == "server":
        memo.server_seen(meta)
    else:
        memo.client_seen(meta)


@kopf.on.login(retries=3)
async def on_login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Kubeconfig where there is one, else the pod's service account."""
    return kopf.login_with_kubeconfig(**kwargs) or kopf.login_with_service_account(**kwargs)


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing is compared with what was handled before; else every event costs a copy of the whole object."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def configure(settings: kopf.OperatorSettings) -> None:
    """Timeouts everywhere, lists in pages, selectors on the server's side, and nothing written by kopf."""
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, *[30] * 20)
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    servers = f"{POOL_LABEL},{ROLE_LABEL}=server"
    for kind in ("daemonsets", "configmaps", "services", "networkpolicies"):
        settings.watching.label_selectors[kind] = servers
    settings.watching.label_selectors["pods"] = POOL_LABEL
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process, not its watches


class Stop:
    """Tells watches on another thread to end. A plain threading.Event would keep a thread waiting after kopf failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._flag: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def set(self) -> None:
        """From any thread, any number of times."""
        with self._lock:
            self._set = True
            if self._flag is not None:
                loop, event = self._flag
                loop.call_soon_threadsafe(event.set)

    @contextmanager
    def flag(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set when this is."""
        event = asyncio.Event()
        with self._lock:
            self._flag = asyncio.get_running_loop(), event
            if self._set:
                event.set()
        try:
            yield event
        finally:
            with self._lock:
                self._flag = None


def operate(watcher: Watcher, settings: Settings, stop: Stop, end_s: float = _END_S) -> None:
    """Watch until *stop*, on a loop of its own.

    Thread: one for each call. When kopf ends it cancels every task of its loop that is younger than itself, so it
    must not share one with the work.

    Raises:
        StuckError: kopf began to end, but did not within *end_s*; what is left of it does not run any more.
        Exception: whatever ended kopf; start again.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_operate(watcher, settings, stop, end_s))
    finally:
        _end(loop)


async def _operate(watcher: Watcher, settings: Settings, stop: Stop, end_s: float) -> None:
    kopf_settings = kopf.OperatorSettings()
    configure(kopf_settings)
    mine = asyncio.all_tasks()
    with stop.flag() as flag:
        tasks = await kopf.spawn_tasks(
            settings=kopf_settings,
            standalone=True,
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
            memo=watcher,
            registry=kopf.get_default_registry(),
            # Else kopf asks who runs it, and the user of a pod has no name.
            identity=settings.identity,  # type: ignore[arg-type]
            stop_flag=flag,
        )
        running = asyncio.create_task(kopf.run_tasks(tasks, ignored=mine))
        await asyncio.wait([running, *tasks], return_when=asyncio.FIRST_COMPLETED)
        # From here on kopf waits for each of its tasks without a deadline, and a watch that is just being opened anew
        # can overhear that it is cancelled.
        await asyncio.wait([running], timeout=end_s)
        if not running.done():
            raise StuckError(f"kopf did not end within {end_s:g} s of {_reason(tasks)}")
        await running


def _reason(tasks: Collection["asyncio.Task[Any]"]) -> str:
    errors = (t.exception() for t in tasks if t.done() and not t.cancelled())
    return next((repr(e) for e in errors if e is not None), "its stop")


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left, once more, and close the loop, whatever became of it."""
    try:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=_CANCELLED_S))
        with suppress(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), _CANCELLED_S))
    finally:
        loop.close()
