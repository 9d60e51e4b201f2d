# SPDX-License-Identifier: Apache-2.0
"""One control plane for all cluster tests of a run, and a client of it."""

import asyncio
import os
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient
from tests.cluster.control_plane import ControlPlane, missing_programs

from kvpool_operator.cluster import Cluster, Kind

T = TypeVar("T")
NAMESPACES = Kind("v1", "Namespace", "namespaces", namespaced=False)
CRDS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts")
CRD_FILE = Path(__file__).parents[2] / "crds" / "kvcachepools.yaml"


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A running control plane with the CRD in it."""
    if missing := missing_programs():
        reason = f"{', '.join(missing)} missing; run `python tools/cluster_assets.py --only control-plane`"
        if os.environ.get("KVPOOL_EXPECT_CLUSTER"):
            pytest.fail(reason)
        pytest.skip(reason)
    with ControlPlane() as running:
        yield running


class Caller:
    """Runs coroutines of a client on one loop."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster) -> None:
        self._runner = runner
        self.cluster = cluster

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def wait(self, what: str, check: Any, deadline_s: float = 60.0) -> Any:
        """Ask *check* (a coroutine function) until its answer is true; returns it."""

        async def until() -> Any:
            async with asyncio.timeout(deadline_s):
                while not (answer := await check()):  # noqa: ASYNC110 - the API server cannot tell us
                    await asyncio.sleep(0.1)
                return answer

        try:
            return self(until())
        except TimeoutError as e:
            raise AssertionError(f"{what}: not within {deadline_s} s") from e


async def connect(kubeconfig: Path) -> ApiClient:
    """A client from *kubeconfig*."""
    return await config.new_client_from_config(str(kubeconfig), persist_config=False)


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Iterator[Caller]:
    """The administrator's client; the CRD is installed."""
    with asyncio.Runner() as runner:
        client = runner.run(connect(control_plane.admin))
        caller = Caller(runner, Cluster(client))
        install_crd(caller)
        yield caller
        runner.run(client.close())


def install_crd(api: Caller) -> None:
    """Create the CRD and wait until its kind is served."""
    api(api.cluster.create(CRDS, "", yaml.safe_load(CRD_FILE.read_text())))

    async def established() -> bool:
        found = await api.cluster.get(CRDS, "", "kvcachepools.kvpool.dev")
        return any(c["type"] == "Established" and c["status"] == "True" for c in found["status"]["conditions"] or ())

    api.wait("the CRD", established)


@pytest.fixture
def namespace(api: Caller) -> Iterator[str]:
    """A fresh namespace that enforces the Baseline level."""
    name = make_namespace(api, "baseline")
    yield name
    api(remove_namespace(api.cluster, name))


def make_namespace(api: Caller, level: str, **labels: str) -> str:
    """A namespace at a pod-security *level*, with its default service account."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": level, **labels}}
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    api(api.cluster.create(ACCOUNTS, name, account))  # or its controller was faster; pods need it
    return name


async def remove_namespace(cluster: Cluster, name: str) -> None:
    """Start its deletion; nobody waits for it."""
    found = await cluster.get(NAMESPACES, "", name)
    await cluster.delete(NAMESPACES, "", name, found["metadata"]["uid"])
