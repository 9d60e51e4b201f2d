# SPDX-License-Identifier: Apache-2.0
"""The operator as a process beside a real control plane: creates, changes, repairs, reports, and rests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import NAMESPACE, Operator, operator
from tests.cluster.servers import Statistics, statistics

from kvpool_operator.cluster import CHILDREN, EVENTS, LEASES, PODS, POOLS, SECRETS, Cluster, Kind
from kvpool_operator.errors import Absent, Conflict

pytestmark = pytest.mark.cluster

NODE_NAMES = ("alpha", "beta", "gamma")
SPEC: dict[str, Any] = {
    "l1": {"size": "1Gi"},
    "gpuAccess": {"mode": "None"},
    "placement": {"nodeSelector": {"test/pool": "yes"}},
}
OWNED = [
    ("ConfigMap", "kvpool-a-client"),
    ("ConfigMap", "kvpool-a-server"),
    ("DaemonSet", "kvpool-a"),
    ("NetworkPolicy", "kvpool-a"),
    ("Service", "kvpool-a-node"),
    ("Service", "kvpool-a-servers"),
]


@pytest.fixture(scope="module")
def numbers() -> Iterator[Statistics]:
    with statistics() as made:
        yield made


@pytest.fixture(scope="module")
def nodes(api: Caller) -> Iterator[tuple[str, ...]]:
    with fake_nodes(api, *NODE_NAMES, **{"test/pool": "yes"}) as names:
        yield names


@pytest.fixture(scope="module")
def replica(
    api: Caller, control_plane: ControlPlane, numbers: Statistics, nodes: tuple[str, ...]
) -> Iterator[Operator]:
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    with operator(control_plane, "operator-0", numbers.url) as made:
        yield made


def make_pool(api: Caller, namespace: str, name: str = "a", **spec: Any) -> None:
    body = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"name": name}, "spec": {**SPEC, **spec}}
    assert api(api.cluster.create(POOLS, namespace, body))


def change(api: Caller, kind: Kind, namespace: str, name: str, edit: Any) -> None:
    """Edit an object as a user would, again if somebody else was faster."""

    async def edited() -> bool:
        body = await api.cluster.get(kind, namespace, name)
        edit(body)
        try:
            await api.cluster.replace(kind, body)
        except Conflict:
            return False
        return True

    api.wait("the edit", edited)


def renew(body: dict[str, Any], round_: str) -> None:
    """A change that only new pods can have."""
    body["spec"]["env"] = [{"name": "ROUND", "value": round_}]


def wait_for_condition(
    api: Caller, namespace: str, kind: str, status: str, reason: str = "", *, deadline_s: float = 90.0
) -> dict[str, Any]:
    async def reached() -> dict[str, Any] | None:
        body = await api.cluster.get(POOLS, namespace, "a")
        found = {c["type"]: c for c in body.get("status", {}).get("conditions", [])}.get(kind, {})
        fresh = found.get("observedGeneration") == body["metadata"]["generation"]
        return body if fresh and found["status"] == status and found["reason"].startswith(reason) else None

    body: dict[str, Any] = api.wait(f"{kind}={status} {reason}", reached, deadline_s)
    return body


async def owned(cluster: Cluster, namespace: str) -> list[tuple[str, str]]:
    found = []
    for kind in CHILDREN.values():
        try:
            items = await cluster.list(kind, namespace, "kvpool.dev/pool=a")
        except Absent:
            continue
        found += [(kind.kind, i["metadata"]["name"]) for i in items]
    return sorted(found)


def test_a_pool_becomes_ready_servers_and_a_status(
    api: Caller, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    numbers.clients, numbers.used_bytes = 2, 1 << 29
    make_pool(api, namespace)

    body = wait_for_condition(api, namespace, "Ready", "True")

    assert body["status"]["servers"]["summary"] == "3/3"
    assert api(owned(api.cluster, namespace)) == OWNED
    assert "finalizers" not in body["metadata"]
    assert "annotations" not in body["metadata"], "kopf leaves nothing on it"
    conditions = {c["type"]: c["reason"] for c in body["status"]["conditions"]}
    assert conditions["GPUAccessReady"] == "NotNeeded"
    assert conditions["ClientsWired"] == "NoClients"

    async def numbers_in() -> dict[str, Any] | None:
        status = (await api.cluster.get(POOLS, namespace, "a"))["status"]
        return status if status.get("clients") == 6 else None

    status = api.wait("the sums", numbers_in)
    assert (status["capacity"], status["used"], status["versions"]) == ("3Gi", "1.5Gi", {"0.1.0": 3})


def test_each_child_comes_back_when_it_is_deleted_or_bent(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    secrets = {s["metadata"]["name"] for s in api(api.cluster.list(SECRETS, namespace))}
    for kind, name in OWNED:
        found = api(api.cluster.get(CHILDREN[kind], namespace, name))
        api(api.cluster.delete(CHILDREN[kind], namespace, name, found["metadata"]["uid"]))

    async def all_back() -> bool:
        return await owned(api.cluster, namespace) == OWNED

    api.wait("all children", all_back)
    assert {s["metadata"]["name"] for s in api(api.cluster.list(SECRETS, namespace))} == secrets, "the key is kept"

    def bend(body: dict[str, Any]) -> None:
        body["spec"]["ports"][0]["port"] = 9

    change(api, CHILDREN["Service"], namespace, "kvpool-a-servers", bend)

    async def straight() -> bool:
        try:
            body = await api.cluster.get(CHILDREN["Service"], namespace, "kvpool-a-servers")
        except Absent:
            return False  # it could not be applied, so it is made anew
        return all(p["port"] != 9 for p in body["spec"]["ports"])

    api.wait("the port", straight)


def test_a_change_reaches_the_children_and_what_is_unwanted_goes(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")

    def edit(body: dict[str, Any]) -> None:
        body["spec"] |= {"logLevel": "Debug", "network": {"policy": False}}

    change(api, POOLS, namespace, "a", edit)
    wait_for_condition(api, namespace, "Ready", "True")

    assert api(owned(api.cluster, namespace)) == [o for o in OWNED if o[0] != "NetworkPolicy"]
    config = api(api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server"))
    assert json.loads(config["data"]["server.json"])["log"] == {"level": "debug"}


def test_what_a_former_version_made_goes_and_what_others_made_with_the_same_labels_stays(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace)
    pool = wait_for_condition(api, namespace, "Ready", "True")
    owner = {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "name": "a",
        "uid": pool["metadata"]["uid"],
        "controller": True,
    }
    labels = {"kvpool.dev/pool": "a", "kvpool.dev/role": "server"}
    for name, owners in (("somebodys", []), ("left-over", [owner])):
        metadata = {"name": name, "labels": labels, "ownerReferences": owners}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        assert api(api.cluster.create(CHILDREN["ConfigMap"], namespace, body))

    async def pruned() -> bool:
        return ("ConfigMap", "left-over") not in await owned(api.cluster, namespace)

    api.wait("the left-over's end", pruned)
    assert api(owned(api.cluster, namespace)) == sorted([*OWNED, ("ConfigMap", "somebodys")])


def test_each_turn_of_a_condition_is_told_by_one_event(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace)
    pool = wait_for_condition(api, namespace, "Ready", "True")

    async def said() -> list[tuple[str, str, str]]:
        found = await api.cluster.list(EVENTS, namespace, fields=f"regarding.uid={pool['metadata']['uid']}")
        return sorted((e["action"], e["type"], e["reason"]) for e in found)

    async def ready_was_told() -> bool:
        return ("ReadyIsTrue", "Normal", "AllServersReady") in await said()

    api.wait("the Event", ready_was_told)
    first = api(said())
    change(api, POOLS, namespace, "a", lambda body: body["spec"].update(podMetadata={"labels": {"-bad-": "x"}}))
    wait_for_condition(api, namespace, "ConfigValid", "False", "Refused")
    change(api, POOLS, namespace, "a", lambda body: body["spec"].update(podMetadata={}))
    wait_for_condition(api, namespace, "Ready", "True")

    async def told_again() -> bool:
        return (await said()).count(("ReadyIsTrue", "Normal", "AllServersReady")) == 2

    api.wait("the second one", told_again)
    last = api(said())
    assert len(first) == len(set(first)), "each was told once"
    assert [e for e in last if e[1] == "Warning" and e not in first] == [("ReadyIsFalse", "Warning", "Refused")]
    assert len(last) <= len(first) + 4


def test_what_the_api_server_refuses_is_said_and_cured_by_the_next_spec(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace, podMetadata={"labels": {"-bad-": "x"}})
    body = wait_for_condition(api, namespace, "ConfigValid", "False", "Refused")
    assert "-bad-" in json.dumps(body["status"]["conditions"])

    def edit(body: dict[str, Any]) -> None:
        body["spec"]["podMetadata"] = {}

    change(api, POOLS, namespace, "a", edit)

    wait_for_condition(api, namespace, "Ready", "True")


def test_a_namespace_that_allows_too_little_is_named_in_the_status(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace, ipc={"mode": "HostPathSocket"})

    body = wait_for_condition(api, namespace, "Ready", "False", "PodsRefused")

    assert "PodSecurity" in json.dumps(body["status"]["conditions"])


def test_a_paced_change_tries_a_canary_and_then_the_others(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace, update={"strategy": "Paced", "settle": "2s"})
    wait_for_condition(api, namespace, "Ready", "True")

    async def pods() -> list[dict[str, Any]]:
        return await api.cluster.list(PODS, namespace, "kvpool.dev/role=server")

    before = {p["metadata"]["uid"] for p in api(pods())}

    change(api, POOLS, namespace, "a", lambda body: renew(body, "once"))
    wait_for_condition(api, namespace, "Ready", "True")

    assert not before & {p["metadata"]["uid"] for p in api(pods())}
    told = [json.loads(line) for line in replica.log().splitlines() if namespace in line]
    steps = [line["text"].split(":")[0] for line in told if line["event"] == "servers.replaced"]
    assert steps[:2] == ["Canary", "Progressing"]


def test_nothing_is_written_while_nothing_happens(
    api: Caller, control_plane: ControlPlane, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")

    async def asked_thrice_more() -> bool:
        return len(numbers.asked) > target

    def writes() -> list[str]:
        return [
            f"{e['verb']} {e['requestURI']}"
            for e in control_plane.audit()
            if e["user"]["username"] == "kvpool-operator"
            and e["verb"] in ("create", "update", "patch", "delete")
            and e.get("objectRef", {}).get("resource") != LEASES.plural
            and e.get("objectRef", {}).get("namespace") == namespace
        ]

    target = len(numbers.asked) + 9
    api.wait("the last numbers", asked_thrice_more)
    first = writes()
    target = len(numbers.asked) + 15
    api.wait("five more looks at the servers", asked_thrice_more)

    assert writes() == first
    assert len([w for w in first if "dryRun" not in w]) <= len(OWNED) + 1 + 10, "children, secret, status, events"


def test_a_deleted_pool_takes_everything_with_it_while_the_operator_is_away(
    api: Caller, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    replica.kill()
    body = api(api.cluster.get(POOLS, namespace, "a"))
    api(api.cluster.delete(POOLS, namespace, "a", body["metadata"]["uid"]))

    async def gone() -> bool:
        left = await owned(api.cluster, namespace)
        return not left and not await api.cluster.list(SECRETS, namespace)

    api.wait("the garbage collector", gone)
    replica.start()


def test_a_namespace_goes_while_the_operator_is_away(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    replica.kill()
    found = api(api.cluster.get(NAMESPACES, "", namespace))
    api(api.cluster.delete(NAMESPACES, "", namespace, found["metadata"]["uid"]))

    async def gone() -> bool:
        try:
            await api.cluster.get(NAMESPACES, "", namespace)
        except Absent:
            return True
        return False

    api.wait("the namespace's end", gone, 90.0)
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}))
    replica.start()


def test_an_api_server_that_comes_back_is_met_again(
    api: Caller, control_plane: ControlPlane, replica: Operator, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    control_plane.stop_api_server()
    control_plane.start_api_server()

    def edit(body: dict[str, Any]) -> None:
        body["spec"]["logLevel"] = "Error"

    change(api, POOLS, namespace, "a", edit)
    wait_for_condition(api, namespace, "Ready", "True")
    config = api(api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server"))
    assert json.loads(config["data"]["server.json"])["log"] == {"level": "error"}


def test_a_second_replica_waits_and_takes_over(
    api: Caller, control_plane: ControlPlane, replica: Operator, numbers: Statistics, namespace: str
) -> None:
    def holder() -> str:
        found: str = api(api.cluster.get(LEASES, NAMESPACE, "kvpool-operator"))["spec"]["holderIdentity"]
        return found

    make_pool(api, namespace)
    wait_for_condition(api, namespace, "Ready", "True")
    with operator(control_plane, "operator-1", numbers.url) as second:
        assert holder() == replica.name
        assert "lease.acquired" not in second.log()
        replica.kill()

        async def taken() -> bool:
            found = await api.cluster.get(LEASES, NAMESPACE, "kvpool-operator")
            return bool(found["spec"]["holderIdentity"] == second.name)

        api.wait("the take-over", taken)

        def edit(body: dict[str, Any]) -> None:
            body["spec"]["logLevel"] = "Warning"

        change(api, POOLS, namespace, "a", edit)
        wait_for_condition(api, namespace, "Ready", "True")
    replica.start()
