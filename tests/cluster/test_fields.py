# SPDX-License-Identifier: Apache-2.0
"""Every field of the spec, changed on a living pool: the children become what the new spec says.

The table comes from the schema, so a new field is tried from its first day on, or fails here until it is.
"""

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import CRDS, NAMESPACES, Caller, connect, install_crd, make_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import NAMESPACE, Operator, operator
from tests.cluster.servers import statistics
from tests.cluster.test_crd import L1, SOCKET, SPEC, body, nodes, place
from tests.cluster.test_operator import change

from kvpool_operator import children
from kvpool_operator.cluster import CHILDREN, POOLS, Cluster
from kvpool_operator.desired import manifests
from kvpool_operator.errors import Absent, Rejected
from kvpool_operator.keys import known_key
from kvpool_operator.settings import Settings
from kvpool_operator.spec import parse_pool
from kvpool_operator.surroundings import Surroundings

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

Spec = dict[str, Any]
Path_ = tuple[str, ...]
NOWHERE = {"placement": {"nodeSelector": {"test/fields": "nowhere"}}}
"""No pods are needed to see what the operator applies."""


def toleration(**fields: Any) -> Spec:
    return {"placement": {"tolerations": [fields]}}


def affinity(operator: str = "In", key: str = "a", value: str | None = "x") -> Spec:
    expression = {"key": key, "operator": operator, "values": [] if value is None else [value]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"placement": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}}


def preferred(weight: int = 1, operator: str = "In", key: str = "a", value: str = "x") -> Spec:
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": [value]}]}
    terms = [{"weight": weight, "preference": term}]
    return {"placement": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}}}


REQUIRED = ("placement", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
PREFERRED = ("placement", "affinity", "nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution", "[]")
IN_TERMS = (*REQUIRED, "nodeSelectorTerms", "[]", "matchExpressions", "[]")
IN_PREFERENCE = (*PREFERRED, "preference", "matchExpressions", "[]")
TOLERATION = ("placement", "tolerations", "[]")

BY_HAND: dict[Path_, tuple[Spec, Spec]] = {
    # changes that need more around them than the schema alone says
    ("gpuAccess", "mode"): ({"gpuAccess": {"mode": "None"}}, {"gpuAccess": {"mode": "NRI"}}),
    ("gpuAccess", "runtimeClassName"): (
        {"gpuAccess": {"mode": "RuntimeClass", "runtimeClassName": "a"}},
        {"gpuAccess": {"mode": "RuntimeClass", "runtimeClassName": "b"}},
    ),
    ("transfer", "mode"): ({"transfer": {"mode": "Auto"}}, {"transfer": {"mode": "Streamed"}}),
    ("network", "auth"): (
        {"network": {"auth": "ServiceAccountToken"}, "ipc": SOCKET},
        {"network": {"auth": "None"}, "ipc": SOCKET},
    ),
    ("resources", "limits", "memory"): (
        {"resources": {"limits": {"memory": "20Gi"}}},
        {"resources": {"limits": {"memory": "21Gi"}}},
    ),
    (*TOLERATION, "key"): (toleration(key="a", operator="Exists"), toleration(key="b", operator="Exists")),
    (*TOLERATION, "operator"): (toleration(key="a", operator="Exists"), toleration(key="a", operator="Equal")),
    (*TOLERATION, "value"): (toleration(key="a", value="a"), toleration(key="a", value="b")),
    (*TOLERATION, "effect"): (
        toleration(key="a", effect="NoSchedule"),
        toleration(key="a", effect="NoExecute"),
    ),
    (*TOLERATION, "tolerationSeconds"): (
        toleration(key="a", effect="NoExecute", tolerationSeconds=1),
        toleration(key="a", effect="NoExecute", tolerationSeconds=2),
    ),
    (*IN_TERMS, "key"): (affinity(key="a"), affinity(key="b")),
    (*IN_TERMS, "operator"): (affinity("In"), affinity("NotIn")),
    (*IN_TERMS, "values", "[]"): (affinity(value="x"), affinity(value="y")),
    (*PREFERRED, "weight"): (preferred(1), preferred(2)),
    (*IN_PREFERENCE, "key"): (preferred(key="a"), preferred(key="b")),
    (*IN_PREFERENCE, "operator"): (preferred(operator="In"), preferred(operator="NotIn")),
    (*IN_PREFERENCE, "values", "[]"): (preferred(value="x"), preferred(value="y")),
}
IMMUTABLE = {("chunkTokens",)}
NO_CHILD: dict[Path_, str] = {
    # fields that only tell the operator, or admission, what to do
    ("update", "canary"): "which pods a Paced update replaces first",
    ("update", "settle"): "how long it waits for them",
    ("update", "paused"): "that it waits",
    ("clients", "rewireUnwired"): "whether it evicts clients",
    ("clients", "payload", "image"): "what admission puts into clients",
    ("clients", "payload", "mode"): "what admission puts into clients",
    ("clients", "payload", "pullPolicy"): "what admission puts into clients",
    ("clients", "loadFailurePolicy"): "what admission puts into clients",
}
ONE_VALUE = {("l1", "evictionPolicy"), ("clients", "payload", "mode")}


def leaves() -> Iterator[tuple[Path_, dict[str, Any]]]:
    """All fields that hold a plain value."""
    for path, node in nodes(SPEC):
        if path and not {"properties", "items", "additionalProperties"} & set(node):
            yield path, node


def two(node: dict[str, Any]) -> tuple[Any, Any]:
    """Two values that *node* allows."""
    if "enum" in node:
        return node["enum"][0], node["enum"][min(1, len(node["enum"]) - 1)]
    match node.get("type"):
        case "boolean":
            return False, True
        case "integer":
            first = node.get("default", node.get("minimum", 1))
            return first, first + (1 if node.get("maximum", 1 << 31) <= 100 else 10)
        case None:
            return ("2Gi", "3Gi") if "pattern" in node else (1, 2)
        case _ if "ms|s|m|h" in node.get("pattern", ""):
            return "15s", "20s"
        case _:
            return ("1", "2") if node.get("pattern", "").startswith("^[0-9]+(") else ("aa", "bb")


def changes() -> dict[str, tuple[Path_, Spec, Spec]]:
    """By the field's name: its path, a spec, and the same with another value of the field."""
    made = {}
    for path, node in leaves():
        if path in IMMUTABLE | ONE_VALUE:
            continue
        before, after = BY_HAND.get(path) or tuple(place(path, value) for value in two(node))
        made[".".join(path)] = path, before, after
    return made


CHANGES = changes()


def test_each_field_has_two_values_to_change_between() -> None:
    assert not {name for name, (_, before, after) in CHANGES.items() if before == after}
    known = {path for path, _ in leaves()}
    assert set(BY_HAND) | IMMUTABLE | ONE_VALUE | set(NO_CHILD) <= known, "the table names fields that are gone"


class Scene:
    """A control plane of its own, since it has kinds that others lack, with an operator and a pool for each field."""

    def __init__(self, api: Caller, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        settings = Settings(namespace=NAMESPACE)
        self._surroundings = Surroundings(api.cluster, settings, time.monotonic, keep_s=0.0)

    async def settled(self, name: str) -> bool:
        """True once the operator has seen the newest spec."""
        found = await self.api.cluster.get(POOLS, self.namespace, name)
        status = found.get("status", {})
        valid = {c["type"]: c["status"] for c in status.get("conditions", ())}.get("ConfigValid")
        messages = [c["message"] for c in status.get("conditions", ()) if c["type"] == "ConfigValid"]
        assert valid != "False", f"{found['spec']}: {messages}"
        return bool(status.get("observedGeneration") == found["metadata"]["generation"])

    async def wanted(self, name: str) -> list[dict[str, Any]]:
        """What the pool's spec asks for."""
        pool = parse_pool(await self.api.cluster.get(POOLS, self.namespace, name))
        live = await children.find(self.api.cluster, pool)
        return list(manifests(pool, await self._surroundings.facts(known_key(live.values()))))

    async def differences(self, name: str) -> list[str]:
        """Children that are missing or would be changed by applying what the spec asks for."""
        found = []
        for made in await self.wanted(name):
            kind, title = CHILDREN[made["kind"]], f"{made['kind']} {made['metadata']['name']}"
            try:
                live = await self.api.cluster.get(kind, self.namespace, made["metadata"]["name"])
            except Absent:
                found.append(f"{title} is missing")
                continue
            applied = await self.api.cluster.apply(made, dry_run=True)
            if _content(live) != _content(applied):
                found.append(title)
        return found


def _content(stored: dict[str, Any]) -> Any:
    """What the operator decides of an object; which pools of other tests keep chunks on nodes comes and goes."""
    plain = copy.deepcopy({k: v for k, v in stored.items() if k not in ("status", "metadata")})
    plain["labels"] = stored["metadata"].get("labels")
    if "server.json" in plain.get("data", {}):
        plain["data"]["server.json"] = json.loads(plain["data"]["server.json"]) | {"living_pools": None}
    return plain


@pytest.fixture(scope="module")
def scene(control_plane: ControlPlane) -> Iterator[Scene]:
    with ControlPlane() as apart, asyncio.Runner() as runner, statistics() as numbers:
        client = runner.run(connect(apart.admin))
        api = Caller(runner, Cluster(client))
        install_crd(api)
        for crd in yaml.safe_load_all((Path(__file__).parent / "monitoring_crds.yaml").read_text()):
            api(api.cluster.create(CRDS, "", crd))
        system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        api(api.cluster.create(NAMESPACES, "", system))

        async def monitors() -> bool:
            return {"PodMonitor", "PrometheusRule"} <= await api.cluster.kinds("monitoring.coreos.com/v1")

        api.wait("the monitors' kinds", monitors)
        with operator(apart, "fields-operator", numbers.url) as made:
            assert isinstance(made, Operator)
            yield Scene(api, make_namespace(api, "privileged", **{"resource.kubernetes.io/admin-access": "true"}))
        runner.run(client.close())


def test_every_field_reaches_the_children_of_a_living_pool(scene: Scene) -> None:
    names = {name: f"p{i}" for i, name in enumerate(CHANGES)}
    for name, (_, before, _) in CHANGES.items():
        assert scene.api(scene.api.cluster.create(POOLS, scene.namespace, body({**NOWHERE, **before}, names[name])))
    for pool in names.values():
        scene.api.wait(f"{pool} made", lambda pool=pool: scene.settled(pool), 120.0)
    first = {name: scene.api(scene.wanted(pool)) for name, pool in names.items()}

    for name, (_, _, after) in CHANGES.items():
        spec = body({**NOWHERE, **after})["spec"]
        change(scene.api, POOLS, scene.namespace, names[name], lambda b, spec=spec: b.update(spec=spec))

    for name, pool in names.items():
        scene.api.wait(f"{name} seen", lambda pool=pool: scene.settled(pool), 120.0)
        assert scene.api(scene.differences(pool)) == [], name
        same = scene.api(scene.wanted(pool)) == first[name]
        assert same == (CHANGES[name][0] in NO_CHILD), f"{name}: children {'stay' if same else 'change'}"


def test_the_field_that_cannot_be_changed_is_refused_and_nothing_moves(scene: Scene) -> None:
    scene.api(scene.api.cluster.create(POOLS, scene.namespace, body({**NOWHERE, "chunkTokens": 128}, "fixed")))
    scene.api.wait("the pool", lambda: scene.settled("fixed"))
    stored = scene.api(scene.api.cluster.get(POOLS, scene.namespace, "fixed"))
    stored["spec"]["chunkTokens"] = 256

    with pytest.raises(Rejected, match="chunkTokens: immutable"):
        scene.api(scene.api.cluster.replace(POOLS, stored))
    assert scene.api(scene.differences("fixed")) == []


def test_every_kind_of_child_comes_back_when_it_is_deleted_or_bent(scene: Scene) -> None:
    """Monitors and claims too; nobody watches these, so the next look finds it."""
    spec = {**NOWHERE, "gpuAccess": {"mode": "DRA"}, "l1": L1}
    scene.api(scene.api.cluster.create(POOLS, scene.namespace, body(spec, "drift")))
    scene.api.wait("the pool", lambda: scene.settled("drift"))
    made = scene.api(scene.wanted("drift"))
    assert {m["kind"] for m in made} == set(CHILDREN), "each kind is tried"
    for m in made:
        kind, name = CHILDREN[m["kind"]], m["metadata"]["name"]
        found = scene.api(scene.api.cluster.get(kind, scene.namespace, name))
        scene.api(scene.api.cluster.delete(kind, scene.namespace, name, found["metadata"]["uid"]))

    async def straight() -> bool:
        return await scene.differences("drift") == []

    scene.api.wait("all children", straight)
    for m in made:
        kind, name = CHILDREN[m["kind"]], m["metadata"]["name"]
        change(scene.api, kind, scene.namespace, name, _bend)
    scene.api.wait("all of them straight", straight)


def _bend(stored: dict[str, Any]) -> None:
    """Change something that the operator decides; where the content cannot be changed, its labels."""
    match stored["kind"]:
        case "ConfigMap":
            stored["data"] = dict.fromkeys(stored["data"], "{}")
        case "NetworkPolicy":
            stored["spec"]["ingress"] = []
        case "PodMonitor":
            stored["spec"]["podMetricsEndpoints"] = []
        case "PrometheusRule":
            stored["spec"]["groups"] = []
        case _:
            stored["metadata"]["labels"]["app.kubernetes.io/name"] = "bent"
