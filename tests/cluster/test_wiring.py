# SPDX-License-Identifier: Apache-2.0
"""Pods created at a real API server that asks the real admission server, whose hooks are the chart's."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.test_operator import make_pool
from tests.cluster.webhooks import NAMESPACE, Deployment, deployment
from tests.unit.operator.cases import PUBLIC_KEY

from kvpool_operator.admission.authority import trusts
from kvpool_operator.cluster import PODS, POOLS, SECRETS
from kvpool_operator.errors import Forbidden, OperatorError

pytestmark = pytest.mark.cluster

Pod = dict[str, Any]


def body(
    name: str, *, pool: str = "a", labels: Pod | None = None, annotations: Pod | None = None, **fields: Any
) -> Pod:
    container = {"name": "vllm", "image": "registry.example/team/vllm:v0.32.0", "args": ["--model", "m"], **fields}
    metadata = {"name": name, "labels": {"kvpool.dev/pool": pool, **(labels or {})}, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


@pytest.fixture(scope="module")
def hooks(api: Caller, control_plane: ControlPlane) -> Iterator[Deployment]:
    """Two replicas."""
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    admin = control_plane.kubeconfig("webhook", ("system:masters",))
    with deployment(control_plane, api, admin) as made:
        for _ in range(2):
            made.add()
        yield made


def create(api: Caller, namespace: str, pod: Pod) -> Pod:
    """The pod as it was stored."""

    async def stored() -> Pod:
        await api.cluster.create(PODS, namespace, pod)
        found: Pod = await api.cluster.get(PODS, namespace, pod["metadata"]["name"])
        return found

    return api(stored())


def annotations(pod: Pod) -> Pod:
    found: Pod = pod["metadata"].get("annotations", {})
    return found


def known(api: Caller, namespace: str, name: str = "a", **spec: Any) -> None:
    """A pool with a key, as the controller leaves it, which both replicas have seen."""
    make_pool(api, namespace, name, **spec)
    api(api.cluster.apply_status(namespace, name, {"serverKey": PUBLIC_KEY}))

    async def seen() -> bool:
        probe = body("probe", pool=name, annotations={"kvpool.dev/pool-namespace": namespace})
        del probe["metadata"]["name"]
        probe["metadata"]["generateName"] = "probe-"
        answers = [await dry_run(api, namespace, probe) for _ in range(4)]
        return all("PoolNotFound" not in annotations(a)["kvpool.dev/wiring"] for a in answers)

    api.wait("the pool at the replicas", seen)


async def dry_run(api: Caller, namespace: str, pod: Pod) -> Pod:
    query = {"fieldManager": "test", "dryRun": "All"}
    found: Pod = await api.cluster._call("POST", PODS.path(namespace), query, body=pod)
    return found


def environment(pod: Pod) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in pod["spec"]["containers"][0].get("env", [])}


def test_a_label_is_enough(api: Caller, hooks: Deployment, namespace: str) -> None:
    known(api, namespace)

    pod = create(api, namespace, body("p"))

    assert annotations(pod)["kvpool.dev/wiring"] == "Complete"
    assert annotations(pod)["kvpool.dev/wired"]
    assert environment(pod)["KVPOOL_CLIENT__SERVER"] == f"tcp://kvpool-a-node.{namespace}.svc:7410"
    assert "--kv-transfer-config" in pod["spec"]["containers"][0]["args"]


def test_a_pod_may_come_before_its_pool(api: Caller, hooks: Deployment, namespace: str) -> None:
    pod = create(api, namespace, body("p"))

    assert annotations(pod)["kvpool.dev/wiring"] == "PoolNotFound"
    assert environment(pod)["KVPOOL_CLIENT__SERVER_KEY_FILE"]


def test_pods_without_the_label_servers_and_other_namespaces_are_not_asked_about(
    api: Caller, hooks: Deployment, namespace: str
) -> None:
    before = asked(hooks)
    plain = body("plain")
    del plain["metadata"]["labels"]["kvpool.dev/pool"]

    stored = [
        create(api, namespace, plain),
        create(api, namespace, body("server", labels={"kvpool.dev/role": "server"})),
        create(api, NAMESPACE, body("own", labels={})),
    ]

    assert not any("kvpool.dev/wiring" in annotations(p) for p in stored)
    assert asked(hooks) == before


def asked(hooks: Deployment) -> float:
    results = ("wired", "noted", "skipped", "refused", "bad")
    series = [f'kvpool_webhook_reviews_total{{result="{r}"}}' for r in results]
    return sum(replica.number(s) for replica in hooks.balancer.replicas for s in series)


def test_another_namespace_may_use_a_pool_that_allows_it_and_no_other(
    api: Caller, hooks: Deployment, namespace: str
) -> None:
    other = make_namespace(api, "restricted")
    known(api, namespace, clients={"allowedNamespaces": [other]})
    far = {"kvpool.dev/pool-namespace": namespace}
    stranger = make_namespace(api, "baseline")
    secure = {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }

    allowed = create(api, other, body("p", annotations=far, **secure))
    refused = create(api, stranger, body("p", annotations=far))

    assert environment(allowed)["KVPOOL_CLIENT__SERVER_KEY"] == PUBLIC_KEY
    assert annotations(refused)["kvpool.dev/wiring"] == "NamespaceNotAllowed"
    assert "kvpool.dev/wired" not in annotations(refused)
    for name in (other, stranger):
        api(remove_namespace(api.cluster, name))


def test_the_socket_is_for_namespaces_that_allow_it(api: Caller, hooks: Deployment, namespace: str) -> None:
    known(api, namespace, ipc={"mode": "HostPathSocket"})
    free = make_namespace(api, "privileged")
    known(api, free, ipc={"mode": "HostPathSocket"})

    streamed, near = create(api, namespace, body("p")), create(api, free, body("p"))

    assert annotations(streamed)["kvpool.dev/wiring"] == "StreamedInstead"
    assert environment(streamed)["KVPOOL_CLIENT__SERVER"].startswith("tcp://")
    assert environment(near)["KVPOOL_CLIENT__SERVER"] == "ipc:///run/kvpool/kvpool.sock"
    assert any("hostPath" in v for v in near["spec"]["volumes"])
    api(remove_namespace(api.cluster, free))


def test_a_required_pod_is_rather_refused_than_left_unwired(api: Caller, hooks: Deployment, namespace: str) -> None:
    required = {"kvpool.dev/wiring": "required"}
    far = {"kvpool.dev/pool-namespace": "nowhere"}

    with pytest.raises(Forbidden, match="PoolNotReady"):
        create(api, namespace, body("p", labels=required, annotations=far))

    assert annotations(create(api, namespace, body("q", labels=required)))["kvpool.dev/wired"]


def test_another_webhooks_container_does_not_disturb_and_what_is_wired_is_wired_once(
    api: Caller, hooks: Deployment, namespace: str
) -> None:
    """A pod that is stored wired and created again, as a backup tool does, comes out as it went in."""
    known(api, namespace)
    first = create(api, namespace, body("p"))
    again = {"apiVersion": "v1", "kind": "Pod", "metadata": {**first["metadata"], "name": "q"}, "spec": first["spec"]}
    for server_made in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        again["metadata"].pop(server_made, None)
    again["spec"].pop("nodeName", None)

    second = create(api, namespace, again)

    assert second["spec"]["containers"] == first["spec"]["containers"]
    assert second["spec"]["volumes"] == first["spec"]["volumes"]


def test_what_cannot_be_read_is_answered_and_the_creation_goes_on(
    api: Caller, hooks: Deployment, namespace: str
) -> None:
    odd = body("p", annotations={"kvpool.dev/container": "nobody"})

    assert annotations(create(api, namespace, odd))["kvpool.dev/wiring"] == "ContainerNotFound"


def test_a_changed_and_a_deleted_pool_are_seen(api: Caller, hooks: Deployment, namespace: str) -> None:
    known(api, namespace)
    found = api(api.cluster.get(POOLS, namespace, "a"))
    api(api.cluster.delete(POOLS, namespace, "a", found["metadata"]["uid"]))

    async def forgotten() -> bool:
        answers = [await dry_run(api, namespace, body("probe")) for _ in range(4)]
        return all(annotations(a)["kvpool.dev/wiring"] == "PoolNotFound" for a in answers)

    api.wait("the pool to be forgotten", forgotten)


def test_the_bundle_verifies_and_the_secret_holds_no_key_that_signs(api: Caller, hooks: Deployment) -> None:
    secret = api(api.cluster.get(SECRETS, NAMESPACE, "kvpool-webhook"))
    data = {k: base64.b64decode(v) for k, v in secret["data"].items()}

    for hook in hooks.hooks().values():
        assert trusts(base64.b64decode(hook["clientConfig"]["caBundle"]), data["tls.crt"])
    assert [k for k, v in data.items() if b"PRIVATE KEY" in v] == ["tls.key"]


def test_a_bent_bundle_is_mended(api: Caller, hooks: Deployment, namespace: str) -> None:
    name = "require.kvpool.dev"
    api(api.cluster.apply_bundle(hooks.configuration, [name], base64.b64encode(b"nothing").decode()))

    async def mended() -> bool:
        try:
            await dry_run(api, namespace, body("p", labels={"kvpool.dev/wiring": "required"}))
        except OperatorError:
            return False
        return True

    api.wait("the bundle", mended)
