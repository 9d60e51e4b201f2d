# SPDX-License-Identifier: Apache-2.0
"""One cluster for all stories of a run, with the chart installed; its state is written down after a failure."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.rendering import Helm
from tests.e2e.kube import Kube
from tests.e2e.local import COLLECTED, LocalCluster, archives, why_not
from tests.engine.conftest import engine_python, small_model
from tools.chart import CHART

__all__ = ["engine_python", "small_model"]

SYSTEM = "kvpool-system"
FAILED, RUNNING = pytest.StashKey[bool](), pytest.StashKey[LocalCluster]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two real nodes with all images."""
    if reason := why_not():
        if os.environ.get("KVPOOL_EXPECT_NODES"):
            pytest.fail(reason)
        pytest.skip(reason)
    with LocalCluster(archives()) as running:
        request.session.stash[RUNNING] = running
        yield running


@pytest.fixture(autouse=True)
def kept_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a failure, everything about the cluster lies in build/e2e."""
    yield
    running = request.session.stash.get(RUNNING, None)
    if running is not None and request.node.stash.get(FAILED, False):
        running.collect(COLLECTED / request.node.name)


@pytest.fixture(scope="session")
def kube(cluster: LocalCluster) -> Kube:
    """The cluster through kubectl, with the chart installed."""
    made = Kube(cluster.kubectl)
    made.kubectl("create", "namespace", SYSTEM)
    made.kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted")
    options = ("--kubeconfig", cluster.control_plane.admin, "--namespace", SYSTEM)
    Helm(cluster.programs["helm"]).run("install", "kvpool", CHART, *options, "--set", "image.registry=localhost")
    made.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=120s", timeout_s=130)
    return made
