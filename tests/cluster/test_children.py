# SPDX-License-Identifier: Apache-2.0
"""Everything a pool owns, applied to a real API server: valid, admitted at its pod-security level, collected."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import Caller, make_namespace, remove_namespace
from tests.cluster.nodes import fake_nodes
from tests.unit.operator.cases import CASES, PRIVATE_KEY, PUBLIC_KEY, facts, raw_pool

from kvpool_operator.cluster import CHILDREN, NODES, PODS, POOLS, SECRETS, Kind
from kvpool_operator.desired import Facts, key_secret, manifests
from kvpool_operator.desired.gpu import DRIVER_STATE_LABEL
from kvpool_operator.errors import Absent, Forbidden, Rejected
from kvpool_operator.spec import GpuMode, IpcMode, Pool, parse_pool

pytestmark = pytest.mark.cluster

BUILT_IN = facts(monitoring_kinds=frozenset())


def store(api: Caller, namespace: str, body: dict[str, Any]) -> Pool:
    api(api.cluster.create(POOLS, namespace, body))
    return parse_pool(api(api.cluster.get(POOLS, namespace, body["metadata"]["name"])))


def apply_all(api: Caller, pool: Pool, known: Facts = BUILT_IN) -> None:
    for made in manifests(pool, known):
        api(api.cluster.apply(made))


def pods_of(pool: Pool, made: dict[str, Any]) -> dict[str, Any]:
    """The pod that the DaemonSet *made* would make."""
    template = made["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": pool.namespace, **template["metadata"]},
        "spec": {**template["spec"], "priorityClassName": ""},
    }


def level_of(pool: Pool) -> str:
    """The pod-security level that we promise for *pool*."""
    shares = pool.spec.ipc.mode is IpcMode.HOST_PATH_SOCKET or pool.spec.l1.persistence == "Node"
    if shares or pool.spec.gpu_access.mode is GpuMode.PRIVILEGED:
        return "privileged"
    return "restricted"


@pytest.fixture(params=["privileged", "baseline", "restricted"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def leveled(api: Caller, level: str) -> Iterator[str]:
    name = make_namespace(api, level, **{"resource.kubernetes.io/admin-access": "true"})
    yield name
    api(remove_namespace(api.cluster, name))


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_children_apply_and_pods_pass_exactly_the_promised_levels(
    api: Caller, leveled: str, level: str, case: Path
) -> None:
    pool = store(api, leveled, raw_pool(case))
    for made in manifests(pool, BUILT_IN):
        api(api.cluster.apply(made, dry_run=True))
    (daemon_set,) = [m for m in manifests(pool, BUILT_IN) if m["kind"] == "DaemonSet"]
    pod = pods_of(pool, daemon_set)
    pod["spec"].pop("runtimeClassName", None)  # needs an object of the cluster; the level does not depend on it
    pod["spec"].pop("priorityClassName")

    if level == "privileged" or level_of(pool) == "restricted":
        assert api(api.cluster.create(PODS, leveled, pod, dry_run=True))
    else:
        with pytest.raises(Forbidden, match="PodSecurity"):
            api(api.cluster.create(PODS, leveled, pod, dry_run=True))


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_applying_twice_changes_nothing(api: Caller, case: Path) -> None:
    namespace = make_namespace(api, "privileged", **{"resource.kubernetes.io/admin-access": "true"})
    pool = store(api, namespace, raw_pool(case))
    apply_all(api, pool)

    for made in manifests(pool, BUILT_IN):
        first = api(api.cluster.get(CHILDREN[made["kind"]], namespace, made["metadata"]["name"]))
        again = api(api.cluster.apply(made))
        assert again["metadata"].get("generation") == first["metadata"].get("generation")
        if made["kind"] != "DaemonSet":  # whose status its controller writes meanwhile
            assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    api(remove_namespace(api.cluster, namespace))


def test_a_changed_spec_is_applied_over_the_old_one(api: Caller, namespace: str) -> None:
    body = raw_pool(next(c for c in CASES if c.name == "cpu"))
    pool = store(api, namespace, body)
    apply_all(api, pool)
    changed = api(api.cluster.get(POOLS, namespace, pool.name))
    changed["spec"] |= {"network": {"port": 7500}, "logLevel": "Error", "podMetadata": {"labels": {"a": "b"}}}

    apply_all(api, parse_pool(api(api.cluster.replace(POOLS, changed))))

    service = api(api.cluster.get(CHILDREN["Service"], namespace, "kvpool-cpu-node"))
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == {"cache": 7500, "bulk": 7412}
    daemon_set = api(api.cluster.get(CHILDREN["DaemonSet"], namespace, "kvpool-cpu"))
    ports = daemon_set["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {p["name"]: p["containerPort"] for p in ports} == {"cache": 7500, "bulk": 7412, "operations": 7411}
    assert daemon_set["spec"]["template"]["metadata"]["labels"]["a"] == "b"


def test_fields_of_others_stay(api: Caller, namespace: str) -> None:
    pool = store(api, namespace, raw_pool(next(c for c in CASES if c.name == "cpu")))
    apply_all(api, pool)
    foreign = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "kvpool-cpu", "namespace": namespace, "annotations": {"example.com/mine": "yes"}},
    }
    api(api.cluster.apply(foreign, manager="somebody-else"))

    apply_all(api, pool)

    stored = api(api.cluster.get(CHILDREN["DaemonSet"], namespace, "kvpool-cpu"))
    assert stored["metadata"]["annotations"]["example.com/mine"] == "yes"


def test_the_secret_is_created_once_and_cannot_be_changed(api: Caller, namespace: str) -> None:
    pool = store(api, namespace, raw_pool(next(c for c in CASES if c.name == "cpu")))
    secret = key_secret(pool, PUBLIC_KEY, PRIVATE_KEY)

    assert api(api.cluster.create(SECRETS, namespace, secret))
    assert not api(api.cluster.create(SECRETS, namespace, secret)), "409 means that it is there"
    assert not api(api.cluster.create(SECRETS, namespace, secret, dry_run=True)), "asked without reading"
    stored = api(api.cluster.get(SECRETS, namespace, secret["metadata"]["name"]))
    with pytest.raises(Rejected, match="immutable"):
        api(api.cluster.replace(SECRETS, {**stored, "data": {}}))


def test_a_claim_with_admin_access_needs_the_namespace_to_allow_it(api: Caller, namespace: str) -> None:
    pool = store(api, namespace, raw_pool(next(c for c in CASES if c.name == "dra")))
    (claim,) = [m for m in manifests(pool, BUILT_IN) if m["kind"] == "ResourceClaimTemplate"]

    with pytest.raises((Rejected, Forbidden), match="admin"):
        api(api.cluster.apply(claim, dry_run=True))


async def servers(api: Caller, namespace: str) -> dict[str, bool]:
    """Ready servers by node."""
    pods = await api.cluster.list(PODS, namespace, "kvpool.dev/role=server")
    return {
        p["spec"]["nodeName"]: any(c["type"] == "Ready" and c["status"] == "True" for c in p["status"]["conditions"])
        for p in pods
        if "nodeName" in p["spec"] and "deletionTimestamp" not in p["metadata"]
    }


@pytest.fixture
def two_nodes(api: Caller) -> Iterator[tuple[str, ...]]:
    with fake_nodes(api, "one", "two", **{"nvidia.com/gpu.present": "true"}) as names:
        yield names


def without_classes(body: dict[str, Any]) -> dict[str, Any]:
    """As *body*, but needing no runtime class."""
    return {**body, "spec": {**body["spec"], "gpuAccess": {"mode": "NRI"}}}


def test_servers_run_on_matching_nodes_and_go_with_their_pool(
    api: Caller, namespace: str, two_nodes: tuple[str, ...]
) -> None:
    pool = store(api, namespace, without_classes(raw_pool(next(c for c in CASES if c.name == "minimal"))))
    known = facts(monitoring_kinds=frozenset(), priority_class=None)
    apply_all(api, pool, known)

    async def all_ready() -> bool:
        return await servers(api, namespace) == dict.fromkeys(two_nodes, True)

    api.wait("a ready server on each node", all_ready)
    api(api.cluster.delete(POOLS, namespace, pool.name, pool.uid))

    async def all_gone() -> bool:
        left = [await api.cluster.list(k, namespace, f"kvpool.dev/pool={pool.name}") for k in built_in_kinds()]
        return not any(left)

    api.wait("the garbage collector", all_gone)


def built_in_kinds() -> list[Kind]:
    return [k for k in CHILDREN.values() if "monitoring" not in k.api_version] + [PODS]


def test_servers_leave_a_node_whose_driver_is_replaced_and_come_back(
    api: Caller, namespace: str, two_nodes: tuple[str, ...]
) -> None:
    one, two = two_nodes
    pool = store(api, namespace, without_classes(raw_pool(next(c for c in CASES if c.name == "minimal"))))
    apply_all(api, pool, facts(monitoring_kinds=frozenset(), priority_class=None))

    async def on(*nodes: str) -> bool:
        return await servers(api, namespace) == dict.fromkeys(nodes, True)

    api.wait("both", lambda: on(one, two))
    label(api, one, "pod-restart-required")
    api.wait("only the other", lambda: on(two))
    label(api, one, "upgrade-done")
    api.wait("both again", lambda: on(one, two))


def label(api: Caller, node: str, state: str) -> None:
    """Set the driver's state on a node, as NVIDIA's operator would."""

    async def patched() -> bool:
        body = await api.cluster.get(NODES, "", node)
        body["metadata"]["labels"][DRIVER_STATE_LABEL] = state
        try:
            await api.cluster.replace(NODES, body)
        except Exception as e:
            if type(e).__name__ != "Conflict":
                raise
            return False
        return True

    api.wait("the label", patched)


def test_deleting_by_uid_spares_a_namesake(api: Caller, namespace: str) -> None:
    pool = store(api, namespace, raw_pool(next(c for c in CASES if c.name == "cpu")))

    assert not api(api.cluster.delete(POOLS, namespace, pool.name, "00000000-0000-4000-8000-000000000000"))
    assert api(api.cluster.get(POOLS, namespace, pool.name))
    assert api(api.cluster.delete(POOLS, namespace, pool.name, pool.uid))
    with pytest.raises(Absent):
        api(api.cluster.get(POOLS, namespace, pool.name))
