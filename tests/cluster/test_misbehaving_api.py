# SPDX-License-Identifier: Apache-2.0
"""The operator behind an API server that breaks, lies and keeps silent: it ends at the truth and makes no ghosts."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import NAMESPACE, Operator, operator
from tests.cluster.proxy import Faults, proxy
from tests.cluster.servers import statistics
from tests.cluster.test_operator import change, make_pool, owned

from kvpool_operator.cluster import CHILDREN, POOLS
from kvpool_operator.errors import Absent

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def faults(control_plane: ControlPlane) -> Iterator[Faults]:
    with proxy(control_plane, "kvpool-operator-behind-proxy") as made:
        yield made


@pytest.fixture(scope="module")
def replica(api: Caller, control_plane: ControlPlane, faults: Faults) -> Iterator[Operator]:
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    more = {"KUBECONFIG": str(faults.kubeconfig), "KVPOOL_OPERATOR_RESYNC_S": "3"}
    more |= {"KVPOOL_OPERATOR_LEASE": "behind-proxy", "KVPOOL_OPERATOR_LEASE_S": "120"}  # it outlives the worst of them
    with statistics() as numbers, operator(control_plane, "operator-p", numbers.url, **more) as made:
        yield made


@pytest.fixture(autouse=True)
def healthy_again(faults: Faults) -> Iterator[None]:
    yield
    faults.status = faults.watch_status = 0
    faults.mute, faults.drop, faults.swap = False, 0.0, False


@pytest.fixture
def watching(api: Caller, replica: Operator, faults: Faults) -> None:
    """All watches are open."""
    wait_for_watches(api, faults)


def wait_for_watches(api: Caller, faults: Faults) -> None:
    """Wait until those of pools, pods and four kinds of children are open."""

    async def open_() -> bool:
        return faults.streams() >= 6

    api.wait("the watches", open_)


def set_level(api: Caller, namespace: str, level: str) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["spec"]["logLevel"] = level

    change(api, POOLS, namespace, "a", edit)


def wait_for_level(api: Caller, namespace: str, level: str) -> None:
    async def reached() -> bool:
        try:
            body = await api.cluster.get(CHILDREN["ConfigMap"], namespace, "kvpool-a-server")
        except Absent:
            return False
        log = json.loads(body["data"]["server.json"]).get("log", {})
        return bool(log.get("level", "info") == level)

    api.wait(f"log level {level}", reached, 60.0)


@pytest.mark.usefixtures("watching")
def test_a_stream_that_is_gone_leaves_no_ghost(api: Caller, faults: Faults, namespace: str) -> None:
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    faults.mute = True
    body = api(api.cluster.get(POOLS, namespace, "a"))
    api(api.cluster.delete(POOLS, namespace, "a", body["metadata"]["uid"]))
    faults.mute = False
    assert faults.inject(410, "too old resource version")
    make_pool(api, namespace, "b")

    async def other() -> bool:
        found = await api.cluster.list(CHILDREN["DaemonSet"], namespace, "kvpool.dev/pool=b")
        return bool(found)

    api.wait("the other pool's children", other)
    stale = api(api.cluster.list(CHILDREN["ConfigMap"], namespace, "kvpool.dev/pool=a"))
    uids = {o["uid"] for m in stale for o in m["metadata"]["ownerReferences"]}
    assert uids <= {body["metadata"]["uid"]}
    created = {m["metadata"]["creationTimestamp"] for m in stale}
    assert all(c <= api(api.cluster.get(POOLS, namespace, "b"))["metadata"]["creationTimestamp"] for c in created)


@pytest.mark.usefixtures("watching")
def test_an_error_within_the_stream_ends_only_the_watches(
    api: Caller, replica: Operator, faults: Faults, namespace: str
) -> None:
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")

    for level in ("Debug", "Warning", "Error"):
        wait_for_watches(api, faults)
        assert faults.inject(500, "etcdserver: leader changed")
        set_level(api, namespace, level)
        wait_for_level(api, namespace, level.lower())

    assert replica.well()
    assert replica.log().count("watches.failed") >= 2, "they were ended and started again"


@pytest.mark.usefixtures("watching")
def test_watches_that_are_answered_with_gone_are_begun_anew(
    api: Caller, replica: Operator, faults: Faults, namespace: str
) -> None:
    """An API server says that within the stream; proxies need not."""
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    before = replica.log().count("watches.failed")
    faults.watch_status = 410
    assert faults.inject(410, "too old resource version"), "all of them have to be opened anew"

    async def ended() -> bool:
        return replica.log().count("watches.failed") > before

    api.wait("the watches' end", ended)
    faults.watch_status = 0

    wait_for_watches(api, faults)
    set_level(api, namespace, "Debug")
    wait_for_level(api, namespace, "debug")
    assert replica.well()


@pytest.mark.parametrize("status", [500, 503, 429, 403])
def test_an_api_server_that_refuses_everything_for_a_while(
    api: Caller, replica: Operator, faults: Faults, namespace: str, status: int
) -> None:
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    faults.status, before = status, faults.broken
    set_level(api, namespace, "Debug")

    async def refused_often() -> bool:
        return faults.broken > before + 5

    api.wait("refused calls", refused_often)
    faults.status = 0

    wait_for_level(api, namespace, "debug")
    assert replica.well()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("watching")
def test_a_minute_without_any_answer_is_outlived_by_the_watches_too(
    api: Caller, replica: Operator, faults: Faults, namespace: str
) -> None:
    """kopf's own patience ends before that."""
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    faults.status, before, begun_s = 503, replica.log().count("watches.failed"), time.monotonic()
    assert faults.inject(410, "too old resource version"), "all of them have to be opened anew"
    set_level(api, namespace, "Debug")

    async def over() -> bool:
        return time.monotonic() - begun_s >= 60.0

    api.wait("a minute's end", over, 90.0)
    faults.status = 0

    wait_for_level(api, namespace, "debug")
    wait_for_watches(api, faults)
    assert replica.log().count("watches.failed") == before, "none was given up"
    assert replica.well()


def test_silence_is_overcome_by_looking(api: Caller, replica: Operator, faults: Faults, namespace: str) -> None:
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    faults.mute = True

    set_level(api, namespace, "Warning")

    wait_for_level(api, namespace, "warning")


def test_lost_and_reordered_events_end_in_the_same_state(
    api: Caller, replica: Operator, faults: Faults, namespace: str
) -> None:
    faults.drop, faults.swap = 0.5, True
    make_pool(api, namespace)
    wait_for_level(api, namespace, "info")
    for level in ("Debug", "Warning", "Error"):
        set_level(api, namespace, level)
    found = api(owned(api.cluster, namespace))
    for kind, name in found:
        uid = api(api.cluster.get(CHILDREN[kind], namespace, name))["metadata"]["uid"]
        api(api.cluster.delete(CHILDREN[kind], namespace, name, uid))

    wait_for_level(api, namespace, "error")

    async def all_back() -> bool:
        return await owned(api.cluster, namespace) == found

    api.wait("all children", all_back)
