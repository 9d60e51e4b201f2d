# SPDX-License-Identifier: Apache-2.0
"""Raw objects of Kubernetes and raw statistics, as the values that judgements are made of."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from tests.cluster.servers import statistics
from tests.unit.operator.cases import with_identity

from kvpool_operator import observe
from kvpool_operator.desired import names
from kvpool_operator.errors import Absent
from kvpool_operator.keys import ensure_key, known_key, new_pair
from kvpool_operator.observed import ServerPod
from kvpool_operator.spec import Pool, parse_pool
from kvpool_operator.wiring import wiring_mark

NOW = dt.datetime(2030, 1, 1, 0, 1, tzinfo=dt.UTC)
POOL: Pool = parse_pool(
    with_identity(
        {
            "metadata": {"name": "a"},
            "spec": {"l1": {"size": "1Gi"}, "clients": {"allowedNamespaces": ["other"]}},
        }
    )
)


class Objects:
    """Lists and gets from a dict, as `Cluster` does from an API server."""

    def __init__(self, **items: list[dict[str, Any]]) -> None:
        self.items = items
        self.listed: list[str] = []

    async def list(self, kind: Any, namespace: str = "", labels: str = "", **_: Any) -> list[dict[str, Any]]:
        self.listed.append(kind.plural)
        found = self.items.get(kind.plural, [])
        servers = [o for o in found if o["metadata"].get("labels", {}).get(names.ROLE_LABEL) == "server"]
        wanted = servers if "=server" in labels and "!=server" not in labels else found
        if "!=server" in labels:
            wanted = [o for o in found if o not in servers]
        return [o for o in wanted if o["metadata"].get("namespace", namespace) == namespace or not namespace]

    async def each(self, kind: Any, namespace: str = "", labels: str = "") -> AsyncIterator[dict[str, Any]]:
        for item in await self.list(kind, namespace, labels):
            yield item

    async def get(self, kind: Any, _namespace: str, name: str) -> dict[str, Any]:
        for item in self.items.get(kind.plural, []):
            if item["metadata"]["name"] == name:
                return item
        raise Absent(name)


def pod(name: str, node: str = "n1", *, ready: bool = True, role: str = "server", **more: Any) -> dict[str, Any]:
    labels = {names.POOL_LABEL: "a", "controller-revision-hash": "r1"} | ({names.ROLE_LABEL: role} if role else {})
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2030-01-01T00:00:30Z"}
    return {
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": name,
            "labels": labels | more.pop("labels", {}),
            "annotations": more.pop("annotations", {}),
            "creationTimestamp": "2030-01-01T00:00:00Z",
        },
        "spec": {"nodeName": node} | more.pop("spec", {}),
        "status": {"phase": "Running", "podIP": "192.0.2.1", "conditions": [condition]} | more.pop("status", {}),
    }


def node(name: str, ready: str = "True") -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def servers(*pods: dict[str, Any], nodes: tuple[dict[str, Any], ...] = ()) -> tuple[ServerPod, ...]:
    objects: Any = Objects(pods=list(pods), nodes=list(nodes))
    return asyncio.run(observe.servers(objects, POOL, NOW))


def test_a_ready_server() -> None:
    (found,) = servers(pod("p1"))

    assert (found.node, found.ready, found.revision, found.ip) == ("n1", True, "r1", "192.0.2.1")
    assert found.state_for_s == 30.0
    assert found.reachable


def test_why_a_server_waits() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "restartCount": 2}
    (found,) = servers(pod("p1", ready=False, status={"containerStatuses": [waiting]}), nodes=(node("n1"),))

    assert (found.waiting, found.message, found.restarts) == ("ImagePullBackOff", "no such image", 2)
    assert found.reachable


def test_a_server_that_no_node_takes_is_named_by_the_node_it_was_made_for() -> None:
    fields = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [fields]}}
    unbound = pod(
        "p1",
        node="",
        ready=False,
        spec={"affinity": {"nodeAffinity": required}},
        status={
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient memory"}
            ]
        },
    )
    (found,) = servers(unbound, nodes=(node("n7"),))

    assert (found.node, found.waiting, found.message) == ("n7", "Unschedulable", "Insufficient memory")
    assert found.state_for_s == 60.0


@pytest.mark.parametrize(("state", "reachable"), [("True", True), ("Unknown", False), ("False", False)])
def test_a_node_out_of_sight(state: str, reachable: bool) -> None:
    (found,) = servers(pod("p1", ready=False), nodes=(node("n1", state),))

    assert found.reachable is reachable


def test_many_unready_servers_cost_one_list_of_nodes() -> None:
    objects: Any = Objects(
        pods=[pod(f"p{i}", f"n{i}", ready=False) for i in range(50)],
        nodes=[node(f"n{i}", "Unknown") for i in range(50)],
    )

    found = asyncio.run(observe.servers(objects, POOL, NOW))

    assert not any(p.reachable for p in found)
    assert objects.listed == ["pods", "nodes"]


def wired(namespace: str = "models", note: str = "Complete", key: str = "") -> dict[str, str]:
    return {names.WIRED: wiring_mark(POOL, key, namespace), names.WIRING: note}


def test_clients_and_their_engines() -> None:
    lws = {"leaderworkerset.sigs.k8s.io/name": "deep", "leaderworkerset.sigs.k8s.io/group-index": "3"}
    own = {"kvpool.dev/group": "mine", **lws}
    objects: Any = Objects(
        pods=[
            pod("c1", role="", labels=lws, annotations=wired()),
            pod("c2", role="", labels={"ray.io/cluster": "big"}),
            pod("c3", role="", labels=own),
            pod("c4", role=""),
            pod("c5", role="", status={"phase": "Succeeded"}),
            pod("s1"),
        ]
    )

    found = asyncio.run(observe.clients(objects, POOL))

    assert [(c.name, c.group, c.wired) for c in found] == [
        ("c1", "models/deep/3", True),
        ("c2", "models/big", False),
        ("c3", "models/mine", False),
        ("c4", "", False),
    ]


def client(annotations: dict[str, str], *, namespace: str = "models", key: str = "", **more: Any) -> Any:
    body = pod("c", role="", annotations=annotations)
    body["metadata"] |= {"namespace": namespace, **more}
    return next(iter(asyncio.run(observe.clients(Objects(pods=[body]), POOL, (), key))), None)  # type: ignore[arg-type]


FAR = {"kvpool.dev/pool-namespace": "models"}


@pytest.mark.parametrize(
    ("annotations", "namespace", "expected"),
    [
        ({}, "models", (False, ("Missed",))),
        (wired(), "models", (True, ())),
        (wired(note="ShellCommand,PoolNotFound"), "models", (True, ("ShellCommand",))),
        ({names.WIRED: "0123", names.WIRING: "Complete"}, "models", (False, ("OutOfDate",))),
        ({names.WIRING: "ContainerUnclear"}, "models", (False, ("ContainerUnclear",))),
        ({**FAR, **wired("other", key="k")}, "other", (True, ())),
        ({**FAR, **wired("other", key="former")}, "other", (False, ("OutOfDate",))),
        ({**FAR, names.WIRING: "NamespaceNotAllowed"}, "stranger", (False, ("NamespaceNotAllowed",))),
        (FAR, "stranger", (False, ("NamespaceNotAllowed",))),
        ({**FAR, **wired("stranger", key="k")}, "stranger", (False, ("NamespaceNotAllowed",))),
        ({**FAR, names.WIRING: "NamespaceNotAllowed"}, "other", (False, ("NamespaceNotAllowed",))),
    ],
)
def test_why_a_client_is_not_wired(annotations: dict[str, str], namespace: str, expected: object) -> None:
    found = client(annotations, namespace=namespace, key="k")

    assert (found.wired, found.reasons) == expected


def test_a_pod_that_means_a_pool_of_the_same_name_elsewhere_is_no_client() -> None:
    assert client({}, namespace="other") is None
    assert client({"kvpool.dev/pool-namespace": "other"}) is None


def test_the_owner_is_the_controller_and_no_other() -> None:
    def reference(kind: str, *, controller: bool) -> dict[str, Any]:
        return {"apiVersion": "apps/v1", "kind": kind, "name": "n", "uid": kind, "controller": controller}

    found = client({}, ownerReferences=[reference("Node", controller=False), reference("ReplicaSet", controller=True)])

    assert (found.owner.kind, found.owner.uid) == ("ReplicaSet", "ReplicaSet")
    assert client({}, ownerReferences=[reference("Node", controller=False)]).owner is None


def test_namespaces_that_are_not_watched_are_not_looked_into() -> None:
    objects: Any = Objects(pods=[pod("c1", role="")])

    asyncio.run(observe.clients(objects, POOL, ("models",)))
    assert objects.listed == ["pods"]
    assert observe.unwatched(POOL, ("models",)) == ("other",)
    assert observe.unwatched(POOL, ("models", "other")) == ()
    assert observe.unwatched(POOL, ()) == (), "all are watched"


def test_an_address_of_the_new_family_is_put_in_brackets() -> None:
    with statistics() as numbers:
        port = numbers.url.split(":")[2].split("/")[0]
        template = f"http://127.0.0.1:{port}/{{ip}}/{{port}}"
        pods = (ServerPod(name="p", uid="p", node="n1", ip="fd00::1"),)
        asyncio.run(read(template, *pods))

    assert [unquote(asked) for asked in numbers.asked] == ["[fd00::1]/7411"]


def test_the_newest_revision_counts() -> None:
    owner = [{"uid": "ds"}]
    labels = {names.ROLE_LABEL: "server"}
    revisions = [
        {"metadata": {"ownerReferences": owner, "labels": labels | {"controller-revision-hash": h}}, "revision": n}
        for h, n in (("old", 9), ("new", 10))
    ]
    body = {
        "metadata": {"name": "kvpool-a", "uid": "ds", "generation": 4},
        "status": {"observedGeneration": 3, "desiredNumberScheduled": 7},
    }
    objects: Any = Objects(daemonsets=[body], controllerrevisions=revisions)

    found = asyncio.run(observe.daemon_set(objects, POOL))

    assert found is not None
    assert (found.revision, found.desired, found.settled) == ("new", 7, False)
    missing: Any = Objects()
    assert asyncio.run(observe.daemon_set(missing, POOL)) is None


async def read(url: str, *pods: ServerPod) -> Any:
    async with aiohttp.ClientSession() as session:
        return await observe.read_stats(session, url, 7411, pods)


def test_statistics_are_read_from_each_server_that_answers() -> None:
    def server(ip: str, **more: Any) -> ServerPod:
        return ServerPod(name=ip, uid=ip, node=f"node-{ip}", ip=ip, **more)

    with statistics() as numbers:
        numbers.clients = 3
        numbers.series = {
            'kvpool_lookups_total{reason="all"}': 5.0,
            'kvpool_lookups_total{reason="short"}': 0.0,
            "kvpool_lookup_tokens_total": 1000.0,
            "kvpool_hit_tokens_total": 400.0,
            'kvpool_store_chunks_total{disposition="stored"}': 7.0,
            'kvpool_store_chunks_total{disposition="full"}': 2.0,
        }
        found = asyncio.run(read(numbers.url, server("x"), server("y", reachable=False), server("", ready=True)))

    (one,) = found
    assert (one.node, one.clients, one.lookups, one.prompt_tokens) == ("node-x", 3, {"all": 5}, 1000)
    assert (one.hit_tokens, one.stored_chunks) == (400, 7)
    assert asyncio.run(read("http://127.0.0.1:9/{ip}", server("x"))) == (), "nobody there"


class Secrets:
    """Creates Secrets as an API server does: the first of a name wins."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}

    async def create(self, _kind: Any, _namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> bool:
        name = body["metadata"]["name"]
        if name in self.stored:
            return False
        if not dry_run:
            self.stored[name] = body["stringData"]["secret"]
        return True


def test_a_key_is_made_once_and_again_only_when_its_secret_is_lost() -> None:
    secrets: Any = Secrets()

    first = asyncio.run(ensure_key(secrets, POOL, ""))
    again = asyncio.run(ensure_key(secrets, POOL, first))
    assert again == first
    assert len(secrets.stored) == 1

    secrets.stored.clear()
    other = asyncio.run(ensure_key(secrets, POOL, first))
    assert other != first
    assert list(secrets.stored) == [names.key_secret(POOL, other)]


def test_any_object_that_remembers_the_key_will_do() -> None:
    assert known_key([{}, {"annotations": {"x": "y"}}, {"annotations": {names.SERVER_KEY: "key"}}]) == "key"
    assert known_key([{"name": "x"}]) == ""
    public, private = new_pair()
    assert (len(public), len(private)) == (40, 40)
    assert public != private
