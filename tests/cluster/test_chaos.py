# SPDX-License-Identifier: Apache-2.0
"""Two replicas that are killed at random during rollouts while the API server goes away and watches fall silent.

The seed of a failed run is in its output; KVPOOL_CHAOS_SEED runs it again, KVPOOL_CHAOS_BLOWS=10 makes it worse.
"""

import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.cluster.operators import NAMESPACE, Operator
from tests.cluster.proxy import Faults, proxy
from tests.cluster.servers import statistics
from tests.cluster.test_operator import OWNED, change, make_pool, owned, renew, wait_for_condition

from kvpool_operator.cluster import CHILDREN, LEASES, PODS, POOLS, SECRETS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NODE_NAMES = tuple(f"chaos-{i}" for i in range(6))
HERE = {"nodeSelector": {"test/chaos": "yes"}}
ROUNDS = ("1", "2")
BLOWS = int(os.environ.get("KVPOOL_CHAOS_BLOWS", "2"))
"""How often something goes wrong in each rollout."""


@dataclass
class Trouble:
    """Two replicas behind one proxy, and everything that may happen to them."""

    control_plane: ControlPlane
    faults: Faults
    replicas: tuple[Operator, ...]
    seed: int
    chance: random.Random = field(default_factory=random.Random)
    done: list[str] = field(default_factory=list)

    def begin(self, name: str) -> None:
        """What happens from here on follows from the seed and *name* alone."""
        print(f"KVPOOL_CHAOS_SEED={self.seed} ({name})")  # noqa: T201 - pytest shows it when the test fails
        self.chance, self.done = random.Random(f"{self.seed} {name}"), []

    def strike(self) -> None:
        """One blow at a random moment; what it ended is started again at another one."""
        self._let_time_pass(4.0)
        blow = self.chance.choice((self.kill_one, self.kill_all, self.api_server_away, self.silence, self.refuse))
        self.done.append(blow.__name__)
        blow()
        self.revive()

    def kill_one(self) -> None:
        self.chance.choice(self.replicas).kill()
        self._let_time_pass(2.0)

    def kill_all(self) -> None:
        for replica in self.replicas:
            replica.kill()
        self._let_time_pass(3.0)

    def api_server_away(self) -> None:
        self.control_plane.stop_api_server()
        self._let_time_pass(2.0)
        self.control_plane.start_api_server()

    def silence(self) -> None:
        self.faults.mute = True
        self._let_time_pass(4.0)
        self.faults.mute = False
        self.faults.inject(410, "too old resource version")

    def refuse(self) -> None:
        self.faults.status = self.chance.choice((500, 503, 429))
        self._let_time_pass(3.0)
        self.faults.status = 0

    def revive(self) -> None:
        """Start what does not run, as a kubelet would: killed, or ended by itself because the Lease was lost."""
        for replica in self.replicas:
            process = self.control_plane.processes.running.get(replica.name)
            if process is None or process.poll() is not None:
                replica.kill()
                replica.start()

    def _let_time_pass(self, most_s: float) -> None:
        threading.Event().wait(self.chance.uniform(0.0, most_s))  # the random moment itself, not a wait for something


@pytest.fixture(scope="module")
def trouble(api: Caller, control_plane: ControlPlane) -> Iterator[Trouble]:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    api(api.cluster.create(NAMESPACES, "", namespace))
    seed = int(os.environ.get("KVPOOL_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_nodes(api, *NODE_NAMES, **{"test/chaos": "yes"}))
        faults = stack.enter_context(proxy(control_plane, "kvpool-operator-in-trouble"))
        numbers = stack.enter_context(statistics())
        more = {
            "KUBECONFIG": str(faults.kubeconfig),
            "KVPOOL_OPERATOR_RESYNC_S": "5",
            "KVPOOL_OPERATOR_LEASE": "chaos",
        }
        replicas = tuple(Operator(control_plane, f"chaos-operator-{i}", numbers.url, more) for i in range(2))
        made = Trouble(control_plane, faults, replicas, seed)
        for replica in replicas:
            stack.callback(replica.stop)
        made.revive()
        yield made


async def servers(api: Caller, namespace: str) -> list[dict[str, Any]]:
    found = await api.cluster.list(PODS, namespace, "kvpool.dev/role=server")
    return [p for p in found if "deletionTimestamp" not in p["metadata"]]


def deleted_pods(control_plane: ControlPlane, namespace: str) -> Counter[str]:
    """Pods that the operator deleted, by how often the API server agreed to it."""
    return Counter(
        e["objectRef"]["name"]
        for e in control_plane.audit()
        if e["user"]["username"] == "kvpool-operator-in-trouble"
        and e["verb"] == "delete"
        and e["objectRef"]["resource"] == "pods"
        and e["objectRef"]["namespace"] == namespace
        and e["responseStatus"]["code"] == 200
    )


def secrets(api: Caller, namespace: str) -> dict[str, str]:
    return {s["metadata"]["name"]: s["metadata"]["uid"] for s in api(api.cluster.list(SECRETS, namespace))}


@pytest.mark.parametrize("strategy", ["Paced", "RollingUpdate"])
def test_rollouts_end_as_if_nothing_had_happened(
    api: Caller, control_plane: ControlPlane, trouble: Trouble, namespace: str, strategy: str
) -> None:
    trouble.begin(strategy)
    update = {"strategy": strategy, "settle": "1s", "maxUnavailable": 2}
    make_pool(api, namespace, update=update, placement=HERE)
    wait_for_condition(api, namespace, "Ready", "True")
    keys, first = secrets(api, namespace), api(servers(api, namespace))
    pool = api(api.cluster.get(POOLS, namespace, "a"))
    former = {p["metadata"]["uid"] for p in first}
    for round_ in ROUNDS:
        change(api, POOLS, namespace, "a", lambda body, round_=round_: renew(body, round_))
        for _ in range(BLOWS):
            trouble.strike()
        wait_for_condition(api, namespace, "Ready", "True", deadline_s=180.0)
        pods = api(servers(api, namespace))
        assert sorted(p["spec"]["nodeName"] for p in pods) == sorted(NODE_NAMES), trouble.done
        assert not former & {p["metadata"]["uid"] for p in pods}, f"every server is new: {trouble.done}"
        former = {p["metadata"]["uid"] for p in pods}

    assert api(owned(api.cluster, namespace)) == OWNED, "no child too many, none too few"
    assert secrets(api, namespace) == keys, "the key was kept"
    for kind, name in OWNED:
        (owner,) = api(api.cluster.get(CHILDREN[kind], namespace, name))["metadata"]["ownerReferences"]
        assert owner["uid"] == pool["metadata"]["uid"]
    deleted = deleted_pods(control_plane, namespace)
    expected = len(NODE_NAMES) * len(ROUNDS) if strategy == "Paced" else 0
    assert sum(deleted.values()) == expected, "each server once for each change, none twice"
    assert set(deleted.values()) <= {1}


def test_two_that_both_believe_to_lead_agree(
    api: Caller, control_plane: ControlPlane, trouble: Trouble, namespace: str
) -> None:
    """A third operator with another Lease works on the same pools: slower than one, and no fight without end."""
    more = {**trouble.replicas[0].more, "KVPOOL_OPERATOR_LEASE": "another"}
    third = Operator(control_plane, "chaos-operator-third", trouble.replicas[0].stats_url, more)
    third.start()
    try:
        make_pool(api, namespace, update={"strategy": "Paced", "settle": "1s", "maxUnavailable": 2}, placement=HERE)
        wait_for_condition(api, namespace, "Ready", "True")
        change(api, POOLS, namespace, "a", lambda body: renew(body, "1"))
        wait_for_condition(api, namespace, "Ready", "True")
        former = {p["metadata"]["uid"] for p in api(servers(api, namespace))}

        async def at_rest() -> bool:
            """Both have renewed their Leases ten times since either of them wrote anything else."""
            turns: Counter[str] = Counter()
            for entry in control_plane.audit():
                if _renews(entry):
                    turns[entry["objectRef"]["name"]] += 1
                elif _writes(entry, namespace):
                    turns.clear()
            return all(turns[name] >= 10 for name in ("chaos", "another"))

        api.wait("ten turns of both", at_rest, 120.0)
    finally:
        third.stop()
    assert {p["metadata"]["uid"] for p in api(servers(api, namespace))} == former
    assert api(owned(api.cluster, namespace)) == OWNED


def _writes(entry: dict[str, Any], namespace: str) -> bool:
    return (
        entry["verb"] in ("create", "update", "patch", "delete")
        and entry.get("objectRef", {}).get("namespace") == namespace
        and entry["user"]["username"] == "kvpool-operator-in-trouble"
        and "dryRun" not in entry["requestURI"]
    )


def _renews(entry: dict[str, Any]) -> bool:
    return entry["verb"] == "update" and entry.get("objectRef", {}).get("resource") == LEASES.plural
