# SPDX-License-Identifier: Apache-2.0
"""The chart upgraded over an older one whose CRD knew less: pools, children and servers stay, the operator goes on."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.rendering import CRD_NAME, Helm, real_helm
from tests.cluster.conftest import CRDS, Caller, connect, make_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_node
from tests.cluster.operators import Operator
from tests.cluster.releases import Release
from tests.cluster.servers import statistics
from tests.cluster.test_operator import change, owned, wait_for_condition
from tools.chart import CHART, CRD_TEMPLATE

from kvpool_operator.cluster import CHILDREN, PODS, POOLS, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

BEFORE = Path(__file__).parents[1] / "golden" / "crd_before"
NODE_NAMES = ("upgrade-a", "upgrade-b")
POOL = yaml.safe_load((BEFORE / "pool.yaml").read_text())


def older_chart(folder: Path) -> Path:
    """The chart with the CRD that it had before."""
    chart = folder / "kvpool"
    shutil.copytree(CHART, chart)
    frozen = (BEFORE / "kvcachepools.yaml").read_text()
    head, _, _ = CRD_TEMPLATE.read_text().partition("spec:\n  group:")
    spec = frozen[frozen.index("\nspec:\n") + 1 :]
    (chart / "templates" / "crd.yaml").write_text(f"{head}{spec}{{{{- end }}}}\n")
    return chart


@dataclass
class Scene:
    """A control plane of its own with the older chart on it, its operator running with its account, and its pool."""

    control_plane: ControlPlane
    api: Caller
    release: Release
    operator: Operator
    namespace: str

    def fields(self) -> set[str]:
        """Sections of the spec that the API server knows."""
        stored = self.api(self.api.cluster.get(CRDS, "", CRD_NAME))
        schema = stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        return set(schema["properties"]["spec"]["properties"])

    def pool(self) -> dict[str, Any]:
        body: dict[str, Any] = self.api(self.api.cluster.get(POOLS, self.namespace, "a"))
        return body

    def children(self) -> dict[tuple[str, str], str]:
        """Uids of what the pool owns."""
        api = self.api
        return {
            (kind, name): api(api.cluster.get(CHILDREN[kind], self.namespace, name))["metadata"]["uid"]
            for kind, name in api(owned(api.cluster, self.namespace))
        }

    def servers(self) -> set[str]:
        found = self.api(self.api.cluster.list(PODS, self.namespace, "kvpool.dev/role=server"))
        return {p["metadata"]["uid"] for p in found if "deletionTimestamp" not in p["metadata"]}

    def log_level(self) -> str:
        """What the servers' file says."""
        found = self.api(self.api.cluster.get(CHILDREN["ConfigMap"], self.namespace, "kvpool-a-server"))
        return str(json.loads(found["data"]["server.json"]).get("log", {}).get("level", "info"))

    def wait_for_schema(self, *, has_level: bool) -> None:
        """Until the API server serves what helm has written."""

        async def served() -> bool:
            body = {**POOL, "metadata": {"name": "probe"}, "spec": {**POOL["spec"], "logLevel": "Debug"}}
            probe = await self.api.cluster._call("POST", POOLS.path(self.namespace), {"dryRun": "All"}, body=body)
            return ("logLevel" in probe["spec"]) == has_level

        self.api.wait("the schema", served)


@pytest.fixture(scope="module")
def helm() -> Helm:
    return real_helm()


@pytest.fixture
def scene(control_plane: ControlPlane, helm: Helm, tmp_path: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        apart = stack.enter_context(ControlPlane())
        runner = stack.enter_context(asyncio.Runner())
        client = runner.run(connect(apart.admin))
        stack.callback(lambda: runner.run(client.close()))
        api = Caller(runner, Cluster(client))
        release = Release(helm, apart, make_namespace(api, "restricted"))
        release.install({"replicas": 0}, chart=older_chart(tmp_path))
        for node in NODE_NAMES:
            fake_node(api, node, **{"test/upgrade": "yes"})
        numbers = stack.enter_context(statistics())
        more = {"KUBECONFIG": str(release.account().kubeconfig), "KVPOOL_OPERATOR_NAMESPACE": release.namespace}
        operator = Operator(apart, "upgrade-operator", numbers.url, more)
        made = Scene(apart, api, release, operator, make_namespace(api, "baseline"))

        async def created() -> bool:
            return await api.cluster.create(POOLS, made.namespace, POOL)

        api.wait("the older kind", created)
        operator.start()
        stack.callback(operator.stop)
        wait_for_condition(api, made.namespace, "Ready", "True")
        yield made


def test_an_upgrade_and_the_way_back_keep_pools_children_and_servers(scene: Scene) -> None:
    assert "logLevel" not in scene.fields()
    before, children, servers = scene.pool(), scene.children(), scene.servers()
    assert "logLevel" not in before["spec"]

    scene.release.install({"replicas": 0})
    scene.wait_for_schema(has_level=True)

    after = scene.pool()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"], "new defaults are no change of the spec"
    assert _within(before["spec"], after["spec"]), "everything that was stored is still there"
    assert after["spec"]["logLevel"] == "Info"
    scene.operator.stop()
    scene.operator.start()  # as the upgrade of its Deployment does; it applies everything once
    change(scene.api, POOLS, scene.namespace, "a", lambda b: b["spec"]["update"].update(maxUnavailable=1))
    wait_for_condition(scene.api, scene.namespace, "Ready", "True")
    assert scene.children() == children, "nothing was made anew"
    assert scene.servers() == servers, "no server was restarted"

    change(scene.api, POOLS, scene.namespace, "a", lambda b: b["spec"].update(logLevel="Debug"))
    wait_for_condition(scene.api, scene.namespace, "Ready", "True", deadline_s=180.0)
    assert scene.children() == children
    assert scene.log_level() == "debug", "the new field reached the servers' file"
    assert scene.servers() == servers, "who follow it"

    scene.release.rollback()
    scene.wait_for_schema(has_level=False)
    change(scene.api, POOLS, scene.namespace, "a", lambda b: b["spec"]["update"].update(maxUnavailable=2))
    wait_for_condition(scene.api, scene.namespace, "Ready", "True", deadline_s=180.0)
    back = scene.pool()
    assert back["metadata"]["uid"] == before["metadata"]["uid"]
    assert "logLevel" not in back["spec"], "lost is only what the older schema does not know"
    assert back["spec"]["tenants"] == before["spec"]["tenants"]
    assert scene.children() == children
    assert scene.operator.well()


def _within(part: Any, whole: Any) -> bool:
    """True if everything in *part* is in *whole*, too."""
    if isinstance(part, dict):
        return all(key in whole and _within(value, whole[key]) for key, value in part.items())
    return bool(part == whole)
