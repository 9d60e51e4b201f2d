# SPDX-License-Identifier: Apache-2.0
"""The list of a pool's servers, for those to whom no name tells it: it follows the pods of a real DaemonSet."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import NAMESPACE, Operator, operator
from tests.cluster.servers import statistics
from tests.cluster.test_operator import change, make_pool, renew, wait_for_condition

from kvpool.model.whereabouts import rendered
from kvpool_operator.cluster import CHILDREN, PODS, POOLS

pytestmark = pytest.mark.cluster

NODE_NAMES = ("place-a", "place-b", "place-c")
HERE = {"nodeSelector": {"test/places": "yes"}}


@pytest.fixture
def replica(api: Caller, control_plane: ControlPlane) -> Iterator[Operator]:
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    with (
        statistics() as numbers,
        fake_nodes(api, *NODE_NAMES, **{"test/places": "yes"}),
        operator(control_plane, "places-operator", numbers.url) as made,
    ):
        yield made


def config_map(api: Caller, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = api(api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server"))
    return found


def wait_for_list(api: Caller, namespace: str, port: int) -> None:
    """Wait until the list says where the pods are."""

    async def told() -> bool:
        pods = await api.cluster.list(PODS, namespace, "kvpool.dev/pool=a,kvpool.dev/role=server")
        places = {p["spec"]["nodeName"]: f"tcp://{p['status'].get('podIP')}:{port}" for p in pods}
        body = await api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server")
        return bool(body["data"]["servers"] == rendered(places)) and sorted(places) == list(NODE_NAMES)

    api.wait("the list", told)


def test_the_list_follows_the_pods_and_stays_while_they_do(api: Caller, replica: Operator, namespace: str) -> None:
    make_pool(api, namespace, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")
    wait_for_list(api, namespace, 7410)

    def move(body: dict[str, Any]) -> None:
        body["spec"]["network"] = {"port": 7500}  # simulated pods get their former addresses again

    change(api, POOLS, namespace, "a", move)
    wait_for_condition(api, namespace, "Ready", "True")
    wait_for_list(api, namespace, 7500)

    before = config_map(api, namespace)
    replica.stop()
    replica.start()
    change(api, POOLS, namespace, "a", lambda body: renew(body, "another"))
    wait_for_condition(api, namespace, "Ready", "True")
    after = config_map(api, namespace)
    # Two simulated pods that are made anew together may swap addresses: then there is something to write.
    same = after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert same or after["data"] != before["data"], "written without a change"
