# SPDX-License-Identifier: Apache-2.0
"""What a pool's status says about pods that opted in."""

import pytest
from tests.unit.operator.world import paced, seen

from kvpool_operator.observed import ClientPod
from kvpool_operator.spec import PoolStatus
from kvpool_operator.status import Progress, status


def client(name: str, *reasons: str, wired: bool = False) -> ClientPod:
    return ClientPod(namespace="models", name=name, node="n", wired=wired, reasons=reasons)


def told(
    *clients: ClientPod, not_evicted: str = "", strangers: tuple[ClientPod, ...] = ()
) -> tuple[PoolStatus, str, str, str]:
    observed = seen(clients=clients, not_evicted=not_evicted, strangers=strangers)
    made = status(paced(), observed, Progress("UpToDate"), PoolStatus(), "2030-01-01T00:00:00Z")
    (found,) = (c for c in made.conditions if c.type == "ClientsWired")
    return made, found.status, found.reason, found.message


def test_unwired_pods_are_counted_by_reason_and_the_first_ten_are_named() -> None:
    pods = [client(f"p{i:02}", "Missed") for i in range(12)] + [
        client("a", "ContainerUnclear"),
        client("w", wired=True),
    ]

    made, truth, reason, message = told(*pods)

    assert (truth, reason) == ("False", "UnwiredPods")
    assert message == "13 pods opted in but are not wired (1 ContainerUnclear, 12 Missed), first models/a"
    assert made.unwired_pod_count == 13
    assert [(p.namespace, p.name, p.reason) for p in made.unwired_pods][:2] == [
        ("models", "a", "ContainerUnclear"),
        ("models", "p00", "Missed"),
    ]
    assert len(made.unwired_pods) == 10


STRANGERS = tuple(
    ClientPod(namespace=n, name="p", node="n", wired=False, reasons=("NamespaceNotAllowed",)) for n in ("z", "y", "y")
)


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ((), ("Unknown", "NoClients")),
        ((client("p", wired=True),), ("True", "AllWired")),
        ((client("p", "Missed"),), ("False", "UnwiredPods")),
    ],
)
def test_pods_of_namespaces_that_are_not_admitted_are_told_and_decide_nothing(
    clients: tuple[ClientPod, ...], expected: tuple[str, str]
) -> None:
    alone, *_ = told(*clients)
    made, truth, reason, message = told(*clients, strangers=STRANGERS)

    assert (truth, reason) == expected
    assert message.endswith("; refused: 3 pods of 2 namespaces that are not in clients.allowedNamespaces, first y/p")
    assert made.refused_pod_count == 3
    assert (made.unwired_pod_count, made.unwired_pods) == (alone.unwired_pod_count, alone.unwired_pods)


def test_what_keeps_them_from_being_evicted_is_said() -> None:
    assert told(client("p", "Missed"), not_evicted="models/p cannot be evicted: a budget")[3].endswith("a budget")


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ((), "2 pods are wired"),
        (("ShellCommand", "StreamedInstead"), "2 pods are wired; left to a person: 1 ShellCommand, 1 StreamedInstead"),
    ],
)
def test_wired_pods_may_leave_something_to_a_person(reasons: tuple[str, ...], expected: str) -> None:
    made, truth, _, message = told(client("p", wired=True), client("q", *reasons, wired=True))

    assert (truth, message) == ("True", expected)
    assert made.unwired_pod_count == 0
    assert made.unwired_pods == ()
