# SPDX-License-Identifier: Apache-2.0
"""Admission servers for tests: real processes behind what a Service does, called by a real API server.

The configuration is the chart's own; only where the API server finds the servers is replaced by an address on loopback.
"""

import asyncio
import contextlib
import http.client
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.chart.rendering import Helm, Object, only, real_helm
from tests.cluster.conftest import Caller
from tests.cluster.control_plane import ControlPlane, free_ports
from tests.cluster.processes import wait_for

from kvpool_operator.cluster import HOOKS

__all__ = ["Balancer", "Deployment", "Replica", "deployment"]

NAMESPACE = "webhook-system"
_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.05
_LINGER_S = "5"
"""Less than by default, since nothing but this process must see that a replica leaves; a busy machine takes a while."""
_TIMEOUT_S = 30
"""As long as an API server may wait at all: these tests are about answers that are lost, not about slow ones."""


@dataclass
class Replica:
    """One process."""

    control_plane: ControlPlane
    name: str
    kubeconfig: Path
    more: dict[str, str]

    def __post_init__(self) -> None:
        self.port, self.health_port = free_ports(2)
        self.scratch = self.control_plane.folder / f"{self.name}-scratch"
        self.scratch.mkdir(exist_ok=True)

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it is ready."""
        environ = {
            "PYTHONPATH": os.pathsep.join(str(_ROOT / part) for part in ("cacheserver", "operator")),
            "KUBECONFIG": str(self.kubeconfig),
            "KVPOOL_WEBHOOK_NAMESPACE": NAMESPACE,
            "KVPOOL_WEBHOOK_NAMES": "127.0.0.1",
            "KVPOOL_WEBHOOK_HOST": "127.0.0.1",
            "KVPOOL_WEBHOOK_PORT": str(self.port),
            "KVPOOL_WEBHOOK_HEALTH_PORT": str(self.health_port),
            "KVPOOL_WEBHOOK_SCRATCH_FOLDER": str(self.scratch),
            "KVPOOL_WEBHOOK_LINGER_S": _LINGER_S,
            "KVPOOL_WEBHOOK_LOOK_S": "0.5",
            **self.more,
        }
        ready = self.ready if wait else (lambda: True)
        self.control_plane.processes.start(
            self.name, [sys.executable, "-m", "kvpool_operator", "webhook"], ready, environ=environ
        )

    def ready(self) -> bool:
        return self.get("/readyz")[0] == http.client.OK

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer beside the reviews; status 0 if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        return 0, ""

    def number(self, series: str) -> float:
        """A sample of its metrics."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{series} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(series)

    def resident_bytes(self) -> int:
        """The most that was ever resident."""
        pid = self.control_plane.processes.running[self.name].pid
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def stop(self, grace_s: float = 15.0) -> None:
        self.control_plane.processes.stop(self.name, grace_s=grace_s)

    def log(self) -> str:
        return self.control_plane.processes.log(self.name).read_text()


class Balancer:
    """What a Service does: new connections go to replicas that are ready, in turn; those that are open stay."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.replicas: list[Replica] = []
        self.connections = 0
        self._turn = 0
        self._well: set[int] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="balancer", daemon=True)

    @property
    def ready(self) -> list[Replica]:
        """Replicas that new connections go to."""
        return [r for r in list(self.replicas) if id(r) in self._well]

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        looking = asyncio.create_task(self._look())
        self._started.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in [looking, *others]:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in list(self._open):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _look(self) -> None:
        """Ask each replica for itself: one that takes its time to answer keeps no news of another back."""
        async with asyncio.TaskGroup() as watches:
            known: set[int] = set()
            while True:
                for replica in list(self.replicas):
                    if id(replica) not in known:
                        known.add(id(replica))
                        watches.create_task(self._watch(replica))
                await asyncio.sleep(_LOOK_S)

    async def _watch(self, replica: Replica) -> None:
        while any(r is replica for r in self.replicas):
            change = self._well.add if await asyncio.to_thread(replica.ready) else self._well.discard
            change(id(replica))
            await asyncio.sleep(_LOOK_S)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        ready, self._turn = self.ready, self._turn + 1
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the stream's own callback cannot bear the latter
            if ready:
                there, back = await asyncio.open_connection("127.0.0.1", ready[self._turn % len(ready)].port)
                self._open.add(back)
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        await self._end(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        await self._end(writer)

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._open.discard(writer)


@dataclass
class Deployment:
    """A running admission server: configuration, balancer, replicas."""

    control_plane: ControlPlane
    api: Caller
    balancer: Balancer
    kubeconfig: Path
    more: dict[str, str] = field(default_factory=dict)
    made: int = 0

    @property
    def configuration(self) -> str:
        return f"{NAMESPACE}.kvpool-webhook"

    def add(self, **more: str) -> Replica:
        """Start another replica and let it take part."""
        self.made += 1
        own = {"KVPOOL_WEBHOOK_CONFIGURATION": self.configuration, **self.more, **more}
        replica = Replica(self.control_plane, f"webhook-{self.made}", self.kubeconfig, own)
        replica.start()
        self.balancer.replicas.append(replica)
        wait_for("the balancer to see it", lambda: replica in self.balancer.ready)
        return replica

    def retire(self, replica: Replica) -> None:
        """End a replica as a rolling update does."""
        replica.stop()
        self.balancer.replicas.remove(replica)

    def install(self, helm: Helm, values: Object | None = None, timeout_s: int = _TIMEOUT_S) -> None:
        """The chart's hooks, reached by the balancer's address."""
        objects = helm.template(values, release="kvpool", namespace=NAMESPACE)
        body = only(objects, "MutatingWebhookConfiguration", webhook=True)
        for hook in body["webhooks"]:
            path = hook["clientConfig"].pop("service")["path"]
            hook["timeoutSeconds"] = timeout_s
            hook["clientConfig"]["url"] = f"https://127.0.0.1:{self.balancer.port}{path}"
        assert self.api(self.api.cluster.create(HOOKS, "", body))

    def hooks(self) -> dict[str, Any]:
        found = self.api(self.api.cluster.get(HOOKS, "", self.configuration))
        return {h["name"]: h for h in found["webhooks"]}

    def remove(self) -> None:
        found = self.api(self.api.cluster.get(HOOKS, "", self.configuration))
        self.api(self.api.cluster.delete(HOOKS, "", self.configuration, found["metadata"]["uid"]))


@contextlib.contextmanager
def deployment(
    control_plane: ControlPlane, api: Caller, kubeconfig: Path, *, timeout_s: int = _TIMEOUT_S, **more: str
) -> Iterator[Deployment]:
    """Hooks and a balancer; replicas are the test's to add."""
    with Balancer() as balancer:
        made = Deployment(control_plane, api, balancer, kubeconfig, more)
        made.install(real_helm(), timeout_s=timeout_s)
        try:
            yield made
        finally:
            made.remove()
            for replica in list(balancer.replicas):
                replica.stop(grace_s=1.0)
