# SPDX-License-Identifier: Apache-2.0
"""The CRD on a real API server: accepted, defaults filled, every rule and every bound accepting and refusing."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import CRDS, Caller
from tests.unit.operator.cases import CASES, raw_pool, with_identity

from kvpool_operator import crd
from kvpool_operator.cluster import POOLS
from kvpool_operator.errors import Rejected
from kvpool_operator.spec import PoolStatus, Servers, dump, parse_pool

pytestmark = pytest.mark.cluster

SCHEMA = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]

L1 = {"size": "1Gi"}
SOCKET = {"mode": "HostPathSocket"}

RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # message's start, a spec that passes, a spec that does not
    ("size: at least", {"l1": {"size": "64Mi"}}, {"l1": {"size": "63Mi"}}),
    ("size: at least", {"l1": {"size": 67108864}}, {"l1": {"size": 1}}),
    ("size: at most", {"l1": {"size": "64Ti"}}, {"l1": {"size": "65Ti"}}),
    (
        "lowWatermark: must",
        {"l1": {**L1, "highWatermark": 50, "lowWatermark": 50}},
        {"l1": {**L1, "highWatermark": 50, "lowWatermark": 51}},
    ),
    (
        "quotas: l1Percent",
        {"tenants": {"quotas": [{"tenant": "a", "l1Percent": 60}, {"tenant": "b", "l1Percent": 40}]}},
        {"tenants": {"quotas": [{"tenant": "a", "l1Percent": 60}, {"tenant": "b", "l1Percent": 41}]}},
    ),
    (
        "runtimeClassName: only",
        {"gpuAccess": {"mode": "RuntimeClass", "runtimeClassName": "x"}},
        {"gpuAccess": {"mode": "NRI", "runtimeClassName": "x"}},
    ),
    (
        "port, operationsPort and bulkPort:",
        {"network": {"port": 7000, "operationsPort": 7001, "bulkPort": 7002}},
        {"network": {"port": 7000, "operationsPort": 7000}},
    ),
    ("port, operationsPort and bulkPort:", {"network": {"bulkPort": 7000}}, {"network": {"bulkPort": 7411}}),
    (
        "moverPorts: must end",
        {"network": {"moverPorts": {"first": 65472, "count": 64}}},
        {"network": {"moverPorts": {"first": 65473, "count": 64}}},
    ),
    (
        "moverPorts: must not hold",
        {"network": {"moverPorts": {"first": 7413, "count": 8}}},
        {"network": {"moverPorts": {"first": 7412}}},
    ),
    ("moverPorts: must not hold", {"network": {"port": 7429}}, {"network": {"port": 7430}}),
    ("moverPorts: must not hold", {"network": {"bulkPort": 7446}}, {"network": {"bulkPort": 7445}}),
    ("network.auth: None only", {"network": {"auth": "None"}, "ipc": SOCKET}, {"network": {"auth": "None"}}),
    (
        "transfer.mode: ClientMoved",
        {"transfer": {"mode": "ClientMoved"}, "ipc": SOCKET},
        {"transfer": {"mode": "ClientMoved"}},
    ),
    (
        "transfer.mode: Ring needs",
        {"transfer": {"mode": "Ring"}},
        {"transfer": {"mode": "Ring"}, "gpuAccess": {"mode": "None"}},
    ),
    (
        "transfer.mode: Ring over TCP",
        {"transfer": {"mode": "Ring"}, "network": {"encryption": "All"}, "ipc": SOCKET},
        {"transfer": {"mode": "Ring"}, "network": {"encryption": "All"}},
    ),
    ("maxUnavailable:", {"update": {"maxUnavailable": 1}}, {"update": {"maxUnavailable": 0}}),
    ("maxUnavailable:", {"update": {"maxUnavailable": "100%"}}, {"update": {"maxUnavailable": "101%"}}),
    ("maxUnavailable:", {"update": {"maxUnavailable": "1%"}}, {"update": {"maxUnavailable": "0%"}}),
    ("maxUnavailable:", {"update": {"maxUnavailable": "7%"}}, {"update": {"maxUnavailable": "7"}}),
    (
        "labels: kvpool.dev/",
        {"podMetadata": {"labels": {"example.com/a": "b"}}},
        {"podMetadata": {"labels": {"kvpool.dev/pool": "b"}}},
    ),
    (
        "annotations: kvpool.dev/",
        {"podMetadata": {"annotations": {"a": "b"}}},
        {"podMetadata": {"annotations": {"kvpool.dev/x": "b"}}},
    ),
    ("name: KVPOOL_", {"env": [{"name": "TZ"}]}, {"env": [{"name": "KVPOOL_SERVER__L1__SIZE_BYTES", "value": "1"}]}),
    ("name: KVPOOL_", {"env": [{"name": "A"}]}, {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}),
    (
        "resources.limits.memory:",
        {"resources": {"limits": {"memory": "2Gi"}}},
        {"resources": {"limits": {"memory": "1Gi"}}},
    ),
    (
        "resources.requests.memory:",
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}},
        {"resources": {"requests": {"memory": "3Gi"}, "limits": {"memory": "2Gi"}}},
    ),
    (
        "value: only with operator Equal",
        {"placement": {"tolerations": [{"key": "a", "operator": "Equal", "value": "b"}]}},
        {"placement": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
    ),
    (
        "key: needed with operator Equal",
        {"placement": {"tolerations": [{"operator": "Exists"}]}},
        {"placement": {"tolerations": [{"effect": "NoSchedule"}]}},
    ),
    (
        "tolerationSeconds: only",
        {"placement": {"tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 1}]}},
        {"placement": {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}]}},
    ),
]


def affinity(operator: str, *values: str) -> dict[str, Any]:
    expression = {"key": "a", "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"placement": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}}


RULES += [
    ("values: needed with", affinity("In", "x"), affinity("In")),
    ("values: needed with", affinity("Exists"), affinity("Exists", "x")),
    ("values: exactly one", affinity("Gt", "1"), affinity("Gt", "1", "2")),
]
ON_CHANGE = {"chunkTokens: immutable"}
ON_NAME = {"metadata.name: at most"}


def body(spec: dict[str, Any], name: str = "a") -> dict[str, Any]:
    return {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "metadata": {"name": name},
        "spec": {"l1": L1, **spec},
    }


def nodes(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, (*path, name))
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], (*path, "[]" if key == "items" else "{}"))


GOOD = {  # one text for each pattern that has no simple one
    r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$": "1Gi",
    r"^[0-9]+(ms|s|m|h)$": "5s",
}


def example(node: dict[str, Any], length: int | None = None) -> Any:  # noqa: PLR0911 - one return for each type
    """A value that *node* allows; of *length* where it is a text, list or map."""
    if "enum" in node:
        return node["enum"][0]
    match node.get("type"):
        case None:
            return "1Gi" if "pattern" in node else 1
        case "integer":
            return node.get("minimum", 1)
        case "boolean":
            return True
        case "array":
            return [numbered(node["items"], i) for i in range(node.get("minItems", 1) if length is None else length)]
        case "object":
            return example_object(node, length)
        case _:
            return text(node, node.get("minLength", 1) if length is None else length)


def example_object(node: dict[str, Any], length: int | None) -> dict[str, Any]:
    if "additionalProperties" in node:
        return {f"k{i}": example(node["additionalProperties"]) for i in range(1 if length is None else length)}
    return {name: example(node["properties"][name]) for name in node.get("required", [])}


def numbered(node: dict[str, Any], number: int) -> Any:
    """Items of a list, different where a list's keys or values must be."""
    item = example(node)
    if isinstance(item, dict):
        for key in ("name", "namespace", "key", "tenant"):
            if key in item:
                item[key] = f"a{number}"
        return {**item, "operator": "Exists"} if "operator" in node["properties"] else item
    return f"a{number}" if isinstance(item, str) else item


def text(node: dict[str, Any], length: int) -> str:
    return GOOD.get(node.get("pattern", ""), "1" * length if "0-9]+(" in node.get("pattern", "") else "a" * length)


def place(path: tuple[str, ...], value: Any, node: dict[str, Any] = SPEC) -> Any:
    """A value of *node* with *value* at *path* and, around it, only what must be there."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if step == "[]":
        return [place(rest, value, node["items"])]
    if step == "{}":
        return {"k": place(rest, value, node["additionalProperties"])}
    around = numbered(node, 0) | ({"operator": "In"} if step == "values" else {})
    inner = place(rest, value, node["properties"][step])
    return {**around, step: inner}


def toleration(**fields: Any) -> dict[str, Any]:
    return {"placement": {"tolerations": [fields]}}


AT = {  # specs for values at a bound that need more around them than the schema alone says
    ("l1", "highWatermark", "minimum"): {"l1": {**L1, "highWatermark": 1, "lowWatermark": 1}},
    ("l1", "lowWatermark", "maximum"): {"l1": {**L1, "highWatermark": 100, "lowWatermark": 100}},
    ("network", "auth", "enum"): {"network": {"auth": "None"}, "ipc": SOCKET},
    ("network", "moverPorts", "first", "maximum"): {"network": {"moverPorts": {"first": 65535, "count": 1}}},
    ("gpuAccess", "mode", "enum"): {"gpuAccess": {"mode": "None"}},
    ("resources", "limits", "memory", "pattern"): {"resources": {"limits": {"memory": "2Gi"}}},
    ("placement", "tolerations", "[]", "operator", "enum"): toleration(key="a", operator="Equal"),
    ("placement", "tolerations", "[]", "value", "pattern"): toleration(key="a", value="a"),
    ("placement", "tolerations", "[]", "value", "maxLength"): toleration(key="a", value="a" * 63),
    ("placement", "tolerations", "[]", "tolerationSeconds", "minimum"): toleration(
        key="a", effect="NoExecute", tolerationSeconds=0
    ),
}


def bounds() -> Iterator[Any]:
    """(section, a spec at the bound, one beyond it) for every bound in the schema of the spec."""
    for path, node in nodes(SPEC):
        for name, at, beyond in limits(node):
            good = AT.get((*path, name)) or place(path, at)
            yield pytest.param(path[0], good, place(path, beyond), id=f"{'.'.join(path)}-{name}")


def limits(node: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if node.get("type") == "integer":
        if "minimum" in node:
            yield "minimum", node["minimum"], node["minimum"] - 1
        if "maximum" in node:
            yield "maximum", node["maximum"], node["maximum"] + 1
    if "enum" in node:
        yield "enum", node["enum"][0], "Unheard-of"
    if "pattern" in node:
        yield "pattern", example(node), "_ not this _"
    simple = "pattern" not in node or node["pattern"] not in GOOD
    for name, least in (
        ("maxLength", False),
        ("minLength", True),
        ("maxItems", False),
        ("minItems", True),
        ("maxProperties", False),
    ):
        if name in node and simple and "x-kubernetes-int-or-string" not in node:
            yield name, example(node, node[name]), example(node, node[name] + (-1 if least else 1))


def test_the_crd_is_established_with_its_names(api: Caller) -> None:
    found = api(api.cluster.get(CRDS, "", "kvcachepools.kvpool.dev"))

    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert (conditions["Established"], conditions["NamesAccepted"]) == ("True", "True")
    assert "NonStructuralSchema" not in conditions
    assert found["spec"]["names"]["shortNames"] == ["kvp"]


@pytest.mark.parametrize(("message", "good", "bad"), RULES, ids=lambda v: v if isinstance(v, str) else "")
def test_every_rule_accepts_and_refuses(
    api: Caller, namespace: str, message: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    assert api(api.cluster.create(POOLS, namespace, body(good), dry_run=True))
    with pytest.raises(Rejected, match=message.split("/", maxsplit=1)[0]):
        api(api.cluster.create(POOLS, namespace, body(bad), dry_run=True))


def test_every_rule_of_the_schema_is_in_the_table() -> None:
    declared = {r["message"] for _, n in nodes(SPEC) for r in n.get("x-kubernetes-validations", [])}
    declared |= {r["message"] for r in SCHEMA["x-kubernetes-validations"]}
    tried = {m for m, _, _ in RULES} | ON_CHANGE | ON_NAME

    untried = {m for m in declared if not any(m.startswith(t) for t in tried)}
    assert not untried


def test_the_chunk_size_cannot_be_changed(api: Caller, namespace: str) -> None:
    api(api.cluster.create(POOLS, namespace, body({"chunkTokens": 128})))
    stored = api(api.cluster.get(POOLS, namespace, "a"))
    changed = copy.deepcopy(stored)

    changed["spec"]["logLevel"] = "Debug"
    stored = api(api.cluster.replace(POOLS, changed))
    changed = copy.deepcopy(stored)
    changed["spec"]["chunkTokens"] = 256
    with pytest.raises(Rejected, match="chunkTokens: immutable"):
        api(api.cluster.replace(POOLS, changed))


@pytest.mark.parametrize("name", ["a" * 48, "0", "a-b-c", "1a"])
def test_good_names(api: Caller, namespace: str, name: str) -> None:
    assert api(api.cluster.create(POOLS, namespace, body({}, name), dry_run=True))


@pytest.mark.parametrize("name", ["a" * 49, "a.b", "a--b"])
def test_names_that_children_could_not_have(api: Caller, namespace: str, name: str) -> None:
    with pytest.raises(Rejected, match=r"metadata\.name"):
        api(api.cluster.create(POOLS, namespace, body({}, name), dry_run=True))


@pytest.mark.parametrize(("section", "at", "beyond"), list(bounds()))
def test_every_bound_accepts_and_refuses(
    api: Caller, namespace: str, section: str, at: dict[str, Any], beyond: dict[str, Any]
) -> None:
    assert api(api.cluster.create(POOLS, namespace, body(at), dry_run=True))
    with pytest.raises(Rejected, match=rf"spec\.{section}"):
        api(api.cluster.create(POOLS, namespace, body(beyond), dry_run=True))


def test_the_server_fills_the_same_defaults_as_the_operator(api: Caller, namespace: str) -> None:
    api(api.cluster.create(POOLS, namespace, body({})))
    stored = api(api.cluster.get(POOLS, namespace, "a"))

    assert stored["spec"]["network"]["port"] == 7410
    assert stored["spec"]["placement"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert stored["spec"]["update"]["settle"] == "60s"
    assert parse_pool(stored).spec == parse_pool(with_identity(body({}))).spec


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_golden_pools_are_accepted_and_read_back_alike(api: Caller, namespace: str, case: Path) -> None:
    raw = raw_pool(case)
    api(api.cluster.create(POOLS, namespace, raw))

    stored = api(api.cluster.get(POOLS, namespace, raw["metadata"]["name"]))

    assert parse_pool(stored).spec == parse_pool(with_identity(raw)).spec
    assert "finalizers" not in stored["metadata"]


def test_the_status_is_a_part_of_its_own(api: Caller, namespace: str) -> None:
    api(api.cluster.create(POOLS, namespace, body({})))
    status = PoolStatus(observed_generation=1, servers=Servers(desired=2, ready=1, updated=1, summary="1/2"))

    api(api.cluster.apply_status(namespace, "a", dump(status)))

    stored = api(api.cluster.get(POOLS, namespace, "a"))
    assert stored["status"]["servers"]["summary"] == "1/2"
    assert stored["metadata"]["generation"] == 1


def test_the_file_is_what_the_api_server_stores(api: Caller) -> None:
    stored = api(api.cluster.get(CRDS, "", "kvcachepools.kvpool.dev"))["spec"]["versions"][0]["schema"]
    committed = yaml.safe_load((Path(__file__).parents[2] / "crds" / "kvcachepools.yaml").read_text())

    assert stored == committed["spec"]["versions"][0]["schema"]
