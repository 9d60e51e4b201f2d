# SPDX-License-Identifier: Apache-2.0
"""The chart installed on a real control plane by the real helm: admitted, granted exactly its rights, taken away."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart import rights as code
from tests.chart.rendering import CRD_NAME, Helm, only, real_helm
from tests.cluster.conftest import CRDS, Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import operator
from tests.cluster.releases import Kubectl, Release
from tests.cluster.servers import statistics
from tests.cluster.test_operator import change, make_pool, owned, wait_for_condition
from tools.chart import CHART, DEPLOY

from kvpool_operator.cluster import PODS, POOLS, Kind
from kvpool_operator.errors import Absent

pytestmark = pytest.mark.cluster

DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")
CLASSES = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False)
CLUSTER_ROLES = Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
NODE = "chart-node"


def forget(api: Caller, kind: Kind, name: str) -> None:
    api(api.cluster.delete(kind, "", name, api(api.cluster.get(kind, "", name))["metadata"]["uid"]))


@pytest.fixture(scope="module")
def helm() -> Helm:
    return real_helm()


@pytest.fixture
def release(api: Caller, control_plane: ControlPlane, helm: Helm) -> Iterator[Release]:
    """A release with the chart's defaults, in a namespace that enforces the Restricted level."""
    made = Release(helm, control_plane, make_namespace(api, "restricted"))
    made.install({"crds": {"install": False}})
    yield made
    made.uninstall()
    forget(api, CLASSES, f"{made.namespace}.{made.name}")
    api(remove_namespace(api.cluster, made.namespace))


@pytest.fixture
def node(api: Caller) -> Iterator[None]:
    with fake_nodes(api, NODE, **{"test/pool": "yes"}):
        yield


def test_all_replicas_run_where_the_restricted_level_is_enforced(api: Caller, release: Release, node: None) -> None:
    async def available() -> bool:
        found = await api.cluster.get(DEPLOYMENTS, release.namespace, "kvpool-operator")
        return found.get("status", {}).get("availableReplicas") == 2

    api.wait("both replicas", available)


def test_the_pod_of_helm_test_is_admitted_there(api: Caller, release: Release, helm: Helm) -> None:
    pod = only(helm.template(release="kvpool", namespace=release.namespace), "Pod")

    assert api(api.cluster.create(PODS, release.namespace, pod, dry_run=True))


def test_the_account_has_the_rights_that_the_code_uses_and_no_other(
    api: Caller, release: Release, namespace: str
) -> None:
    everywhere = code.pool_rights() | code.cluster_rights()

    assert release.granted(namespace) == everywhere
    assert release.granted(release.namespace) == everywhere | code.own_rights()


def test_with_named_namespaces_it_has_rights_in_them_alone(api: Caller, release: Release, namespace: str) -> None:
    other = make_namespace(api, "baseline")
    release.install({"crds": {"install": False}, "watchNamespaces": [namespace]})

    assert release.granted(namespace) == code.pool_rights() | code.cluster_rights()
    assert release.granted(release.namespace) == code.own_rights() | code.cluster_rights()
    assert release.granted(other) == code.cluster_rights()
    api(remove_namespace(api.cluster, other))


@pytest.mark.parametrize("named", [False, True], ids=["cluster", "namespaced"])
def test_the_operator_does_its_work_with_these_rights_alone(
    api: Caller, control_plane: ControlPlane, release: Release, node: None, namespace: str, named: bool
) -> None:
    """Make, report, roll out, prune, all by a real process with the chart's account; the audit log has no refusal."""
    release.install({"crds": {"install": False}, "watchNamespaces": [namespace] if named else []})
    more = {
        "KUBECONFIG": str(release.account().kubeconfig),
        "KVPOOL_OPERATOR_NAMESPACE": release.namespace,
        "KVPOOL_OPERATOR_WATCH_NAMESPACES": namespace if named else "",
    }

    def edit(body: dict[str, Any]) -> None:
        body["spec"] |= {"podMetadata": {"labels": {"round": "1"}}, "network": {"policy": False}}

    with statistics() as numbers, operator(control_plane, "chart-operator", numbers.url, **more):
        make_pool(api, namespace, update={"strategy": "Paced", "settle": "2s"})
        wait_for_condition(api, namespace, "Ready", "True")
        before = api(owned(api.cluster, namespace))
        change(api, POOLS, namespace, "a", edit)  # the pod is replaced by the operator, the policy deleted
        wait_for_condition(api, namespace, "Progressing", "False")
        wait_for_condition(api, namespace, "Ready", "True")

    assert set(before) - set(api(owned(api.cluster, namespace))) == {("NetworkPolicy", "kvpool-a")}
    user = f"system:serviceaccount:{release.namespace}:kvpool-operator"
    mine = [e for e in control_plane.audit() if e["user"]["username"] == user]
    assert {"patch", "create", "delete", "update"} <= {e["verb"] for e in mine}
    assert not [e["requestURI"] for e in mine if e["annotations"]["authorization.k8s.io/decision"] == "forbid"]


def test_the_lease_of_another_is_out_of_reach(release: Release) -> None:
    asked = ("auth", "can-i", "--namespace", release.namespace)

    assert release.account()(*asked, "update", "leases.coordination.k8s.io/kvpool-operator").strip() == "yes"
    with pytest.raises(AssertionError):
        release.account()(*asked, "update", "leases.coordination.k8s.io/another")


def test_helm_test_passes_for_the_account_and_fails_for_a_stranger(
    control_plane: ControlPlane,
    release: Release,
    helm: Helm,
    tmp_path: Path,
) -> None:
    (container,) = only(helm.template({"metrics": {"service": False}}), "Pod")["spec"]["containers"]
    text, _, *targets = container["args"]
    admin = Kubectl(control_plane, control_plane.admin)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(control_plane.port)}
    (tmp_path / "ca.crt").write_bytes(control_plane.authority.file.read_bytes())

    def run(account: str) -> int:
        (tmp_path / "token").write_text(admin("create", "token", account, "--namespace", release.namespace).strip())
        command = [sys.executable, "-c", text, str(tmp_path), *targets]
        return subprocess.run(command, env=os.environ | environ, check=False, timeout=30).returncode

    assert run("kvpool-operator") == 0
    assert run("default") == 1


def test_who_may_edit_a_namespace_may_edit_its_pools(
    api: Caller, control_plane: ControlPlane, release: Release, namespace: str
) -> None:
    admin = Kubectl(control_plane, control_plane.admin)
    for role in ("view", "edit"):
        admin("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er", "--namespace", namespace)

    async def aggregated() -> bool:
        rules = (await api.cluster.get(CLUSTER_ROLES, "", "edit"))["rules"]
        return any("kvpool.dev" in r["apiGroups"] and "create" in r["verbs"] for r in rules)

    api.wait("the roles", aggregated)
    viewer, editor = (Kubectl(control_plane, control_plane.kubeconfig(f"{role}er")) for role in ("view", "edit"))
    pool = {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "metadata": {"name": "p"},
        "spec": {"l1": {"size": "1Gi"}},
    }
    editor("create", "--validate=false", "--namespace", namespace, "-f", "-", stdin=json.dumps(pool))
    assert "kvcachepool" in viewer("get", "kvp", "--namespace", namespace, "-o", "name")
    with pytest.raises(AssertionError, match="orbidden"):
        viewer("delete", "kvp", "p", "--namespace", namespace)


def test_two_releases_beside_each_other(api: Caller, release: Release, namespace: str) -> None:
    other = Release(release.helm, release.control_plane, release.namespace, name="second")
    other.install({"crds": {"install": False}, "watchNamespaces": [namespace]})
    try:
        assert other.granted(namespace) == code.pool_rights() | code.cluster_rights()
    finally:
        other.uninstall()
    forget(api, CLASSES, f"{release.namespace}.second")

    assert release.granted(namespace) == code.pool_rights() | code.cluster_rights()


def test_uninstalling_leaves_the_crd_the_pools_and_their_priority(
    api: Caller,
    control_plane: ControlPlane,
    helm: Helm,
    namespace: str,
) -> None:
    made = Release(helm, control_plane, make_namespace(api, "restricted"), name=f"r{uuid.uuid4().hex[:6]}")
    options = ("--kubeconfig", control_plane.admin, "--namespace", made.namespace)
    # The CRD is there already, as if kubectl had brought it.
    helm.run("install", made.name, CHART, *options, "--take-ownership", "--force-conflicts")
    pool = {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "metadata": {"name": "p"},
        "spec": {"l1": {"size": "1Gi"}},
    }
    api(api.cluster.create(POOLS, namespace, pool))

    made.uninstall()

    assert api(api.cluster.get(POOLS, namespace, "p"))
    assert api(api.cluster.get(CRDS, "", CRD_NAME))
    forget(api, CLASSES, f"{made.namespace}.{made.name}")
    with pytest.raises(Absent):
        api(api.cluster.get(DEPLOYMENTS, made.namespace, f"{made.name}-operator"))
    api(remove_namespace(api.cluster, made.namespace))


def test_the_file_for_kubectl_applies_twice(api: Caller, control_plane: ControlPlane) -> None:
    admin = Kubectl(control_plane, control_plane.admin)
    bodies: list[dict[str, Any]] = [b for b in yaml.safe_load_all(DEPLOY.read_text()) if b]
    apart = "-chart-test"  # the namespace of other tests is not this one's to delete
    text = DEPLOY.read_text().replace("kvpool-system", f"kvpool-system{apart}")
    for _ in range(2):
        admin("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    without_crd = [b for b in yaml.safe_load_all(text) if b and b["kind"] != "CustomResourceDefinition"]
    assert len(without_crd) == len(bodies) - 1
    admin("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(without_crd))


def test_nobody_without_a_role_sees_a_pool(api: Caller, control_plane: ControlPlane, namespace: str) -> None:
    stranger = Kubectl(control_plane, control_plane.kubeconfig("stranger"))

    assert not {right for right in stranger.rights(namespace) if right[0] == "kvpool.dev"}
    with pytest.raises(AssertionError, match="orbidden"):
        stranger("get", "kvp", "--namespace", namespace)
