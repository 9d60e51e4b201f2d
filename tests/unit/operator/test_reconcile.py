# SPDX-License-Identifier: Apache-2.0
"""What a pass over a pool asks of the API server: everything at first, later only what changed."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from tests.unit.operator.cases import PUBLIC_KEY, with_identity

from kvpool_operator.desired.names import POOL_LABEL, ROLE_LABEL
from kvpool_operator.errors import Absent, Busy
from kvpool_operator.kept import Part
from kvpool_operator.queue import Outcome
from kvpool_operator.reconcile import Reconciler
from kvpool_operator.settings import Settings
from kvpool_operator.surroundings import Surroundings

KEY = ("models", "a")
SERVER = {POOL_LABEL: "a", ROLE_LABEL: "server"}
NODES = ("n1", "n2")
CHANGES = frozenset({"apply", "status", "create", "delete"})
AT_REST = [("get", "kvcachepools")]


class Api:
    """An API server as `Cluster` shows it, with a DaemonSet controller that has always done its work."""

    def __init__(self) -> None:
        self.pool = with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}}})
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.revision = ""
        self.clients: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self.broken = ""
        self.nodes = NODES

    def _asked(self, verb: str, plural: str) -> None:
        self.asked.append((verb, plural))
        if self.broken == plural:
            raise Busy(f"{plural} cannot be had")

    async def get(self, kind: Any, _namespace: str, name: str) -> dict[str, Any]:
        self._asked("get", kind.plural)
        if kind.plural == "kvcachepools":
            return self.pool
        if (kind.kind, name) not in self.objects:
            raise Absent(name)
        return self.objects[kind.kind, name]

    async def list(self, kind: Any, _namespace: str = "", labels: str = "", **_: Any) -> list[dict[str, Any]]:
        self._asked("list", kind.plural)
        if kind.plural == "pods":
            return self.clients if "!=server" in labels else [self._server(node) for node in self.nodes]
        if kind.plural == "controllerrevisions":
            owner = [{"uid": "uid-DaemonSet"}]
            labelled = {"name": "r", "labels": {"controller-revision-hash": self.revision}, "ownerReferences": owner}
            return [{"metadata": labelled, "revision": 1}]
        return [o for (name, _), o in self.objects.items() if name == kind.kind]

    async def each(self, kind: Any, namespace: str = "", labels: str = "") -> AsyncIterator[dict[str, Any]]:
        for item in await self.list(kind, namespace, labels):
            yield item

    async def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        self._asked("apply", body["kind"])
        name = body["kind"], body["metadata"]["name"]
        generation = self.objects.get(name, {}).get("metadata", {}).get("generation", 0) + 1
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{name[0]}", "generation": generation}}
        if body["kind"] == "DaemonSet":
            self.revision = f"r{generation}"
            made["status"] = {"observedGeneration": generation, "desiredNumberScheduled": len(NODES)}
        self.objects[name] = made
        return made

    async def apply_status(self, _namespace: str, _name: str, status: dict[str, Any]) -> None:
        self._asked("status", "kvcachepools")
        self.pool = {**self.pool, "status": status}

    async def create(self, kind: Any, _namespace: str, _body: Any, *, dry_run: bool = False) -> bool:
        self._asked("trial" if dry_run else "create", kind.plural)
        return not dry_run

    async def kinds(self, _group_version: str) -> frozenset[str]:
        return frozenset()

    async def read(self, path: str) -> str:
        return '{"issuer": "https://issuer"}' if "well-known" in path else '{"keys": []}'

    def _server(self, node: str) -> dict[str, Any]:
        made = "2030-01-01T00:00:00Z"
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": made}
        labels = {**SERVER, "controller-revision-hash": self.revision}
        return {
            "metadata": {"name": f"s-{node}", "uid": node, "labels": labels, "creationTimestamp": made},
            "spec": {"nodeName": node},
            "status": {"conditions": [ready], "podIP": "192.0.2.1"},
        }


class Passes:
    """A reconciler, its API server and a clock that tests move."""

    def __init__(self) -> None:
        self.api = Api()
        self.now_s = 0.0
        cluster: Any = self.api
        settings = Settings()

        async def no_stats(_port: int, _pods: Iterable[Any]) -> tuple[()]:
            return ()

        surroundings = Surroundings(cluster, settings, lambda: 0.0)
        start = dt.datetime(2030, 1, 1, 1, 0, tzinfo=dt.UTC)
        self.reconciler = Reconciler(
            cluster, settings, surroundings, no_stats, lambda: self.now_s, lambda: start + dt.timedelta(0, self.now_s)
        )

    def look(self, after_s: float = 6.0) -> list[tuple[str, str]]:
        """What one pass asks for."""
        self.now_s += after_s
        self.api.asked.clear()
        self.outcome: Outcome = asyncio.run(self.reconciler(KEY))
        return list(self.api.asked)

    def client(self, name: str) -> None:
        """A pod that nobody wired appears."""
        self.api.clients.append(
            {"metadata": {"name": name, "namespace": "models", "labels": {POOL_LABEL: "a"}}, "spec": {"nodeName": "n1"}}
        )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """At rest: everything was made, seen and told."""
    monkeypatch.setattr("kvpool_operator.keys.new_pair", lambda: (PUBLIC_KEY, "private"))
    made = Passes()
    for _ in range(4):
        made.look(30.0)
    return made


def test_a_pass_over_a_pool_at_rest_asks_for_the_pool_alone(passes: Passes) -> None:
    assert passes.look() == AT_REST
    assert passes.outcome.failed is False


def test_a_client_costs_one_list_and_the_status(passes: Passes) -> None:
    passes.client("engine-0")
    passes.reconciler.changed(KEY, Part.CLIENTS)

    assert passes.look() == [*AT_REST, ("list", "pods"), ("status", "kvcachepools")]
    assert passes.api.pool["status"]["unwiredPodCount"] == 1


def test_nobody_saw_it_and_it_is_found_all_the_same(passes: Passes) -> None:
    passes.look(60.0)
    passes.client("engine-0")

    assert passes.look() == AT_REST
    passes.look(60.0)
    assert passes.api.pool["status"]["unwiredPodCount"] == 1


def test_a_server_is_looked_at_with_what_its_controller_says(passes: Passes) -> None:
    passes.reconciler.changed(KEY, Part.SERVERS)

    asked = [("list", "pods"), ("get", "daemonsets"), ("list", "controllerrevisions")]
    assert passes.look() == [*AT_REST, *asked]


def test_a_child_that_was_removed_is_made_again(passes: Passes) -> None:
    (name,) = [n for n in passes.api.objects if n[0] == "NetworkPolicy"]
    del passes.api.objects[name]
    assert passes.look() == AT_REST

    passes.reconciler.changed(KEY, Part.CHILDREN)
    passes.look()

    assert name in passes.api.objects


def test_another_spec_is_applied_and_its_servers_are_looked_at_afterwards(passes: Passes) -> None:
    metadata = {**passes.api.pool["metadata"], "generation": 2}
    passes.api.pool = {**passes.api.pool, "metadata": metadata, "spec": {"l1": {"size": "1Gi"}, "chunkTokens": 512}}

    asked = passes.look()

    assert asked.index(("apply", "DaemonSet")) < asked.index(("get", "daemonsets"))
    assert passes.api.pool["status"]["observedGeneration"] == 2
    assert passes.look(30.0)
    assert passes.look() == AT_REST


@pytest.mark.parametrize("plural", ["configmaps", "pods"])
def test_what_could_not_be_read_is_read_by_the_next_pass(passes: Passes, plural: str) -> None:
    passes.client("engine-0")
    passes.reconciler.changed(KEY, Part.CHILDREN | Part.CLIENTS)
    passes.api.broken = plural
    passes.look()
    assert passes.outcome.failed

    passes.api.broken = ""
    passes.look()

    assert passes.api.pool["status"]["unwiredPodCount"] == 1


def test_why_pods_are_missing_is_asked_only_where_no_server_is_ready(passes: Passes) -> None:
    passes.api.nodes = ("n1",)
    passes.reconciler.changed(KEY, Part.SERVERS)
    assert ("list", "events") not in passes.look()

    passes.api.nodes = ()
    passes.reconciler.changed(KEY, Part.SERVERS)
    assert ("list", "events") in passes.look()


def test_a_pool_at_rest_is_written_by_nobody(passes: Passes) -> None:
    asked = [call for _ in range(20) for call in passes.look(30.0)]

    assert not [verb for verb, _ in asked if verb in CHANGES]
