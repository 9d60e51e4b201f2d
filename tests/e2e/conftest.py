# SPDX-License-Identifier: Apache-2.0
"""One cluster for all stories of a run, with the chart installed; its state is written down after a failure.

``E2E_PROVIDER=existing`` takes the cluster of KUBECONFIG, whose nodes have the images of `tools.node_images`, and
``E2E_REGISTRY`` (default localhost) before their names.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.chart.rendering import Helm
from tests.e2e.existing import ExistingCluster
from tests.e2e.kube import Kube
from tests.e2e.local import COLLECTED, LocalCluster, archives, why_not
from tests.engine.conftest import engine_python, small_model
from tests.engine.harness import PATIENCE
from tools.chart import CHART

__all__ = ["engine_python", "small_model"]

SYSTEM = "kvpool-system"
RUNNING = pytest.StashKey[ExistingCluster]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(600 * PATIENCE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a failure, everything about the cluster lies in build/e2e."""
    report = yield
    running = item.session.stash.get(RUNNING, None)
    if report.failed and running is not None:
        running.collect(COLLECTED / item.name)
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[ExistingCluster]:
    """A cluster with real nodes."""
    if os.environ.get("E2E_PROVIDER") == "existing":
        found = request.session.stash[RUNNING] = ExistingCluster()
        yield found
        return
    if reason := why_not():
        if os.environ.get("KVPOOL_EXPECT_NODES"):
            pytest.fail(reason)
        pytest.skip(reason)
    with LocalCluster(archives()) as running:
        request.session.stash[RUNNING] = running
        yield running


@pytest.fixture(scope="session")
def kube(cluster: ExistingCluster) -> Kube:
    """The cluster through kubectl, with the chart installed where the Restricted level is enforced."""
    made = Kube(cluster.kubectl)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": labels}})
    values = ("--set", f"image.registry={os.environ.get('E2E_REGISTRY', 'localhost')}")
    options = ("--install", "--kubeconfig", cluster.kubeconfig, "--namespace", SYSTEM, *values)
    Helm(cluster.programs["helm"]).run("upgrade", "kvpool", CHART, *options)
    made.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=150s", timeout_s=310)
    return made


@pytest.fixture(scope="session")
def operators(kube: Kube) -> list[str]:
    """Nodes of the operator's replicas as they were installed; a story that drains a node moves them."""
    return [p["spec"]["nodeName"] for p in kube.all("pods", SYSTEM, "app.kubernetes.io/component=operator")]


@pytest.fixture(scope="session")
def nodes(kube: Kube, operators: list[str]) -> list[str]:
    """Two nodes."""
    found = kube.nodes()[:2]
    assert len(found) == 2, "the stories need two nodes"
    return found
