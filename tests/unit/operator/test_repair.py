# SPDX-License-Identifier: Apache-2.0
"""Whom repair tells what, and whom it evicts when."""

import asyncio
import datetime as dt
from typing import Any

import pytest
from tests.unit.operator.cases import with_identity

from kvpool_operator.errors import Busy, Forbidden
from kvpool_operator.observed import ClientPod, Owner
from kvpool_operator.repair import History, Repair, choose, helps
from kvpool_operator.spec import Pool, parse_pool
from kvpool_operator.wiring import Note, Skip

START = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def pool(*, rewire: bool = True, allowed: tuple[str, ...] = ()) -> Pool:
    clients = {"rewireUnwired": rewire, "allowedNamespaces": list(allowed)}
    return parse_pool(with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}, "clients": clients}}))


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def pod(
    name: str, *reasons: str, owner: str = "rs", wired: bool = False, made_s: float = -3600, **more: Any
) -> ClientPod:
    controller = Owner(api_version="apps/v1", kind="ReplicaSet", name=owner, uid=owner) if owner else None
    known = {"namespace": "models", "node": "n", "uid": name, "owner": controller, "made_at": at(made_s).isoformat()}
    return ClientPod(name=name, wired=wired, reasons=reasons, **(known | more))


def chosen(*pods: ClientPod, history: History | None = None, now_s: float = 0.0, of: Pool | None = None) -> str:
    found = choose(of or pool(), pods, history or History(), at(now_s))
    return found.name if found else ""


def test_only_where_the_pool_says_so() -> None:
    assert chosen(pod("p", "Missed"), of=pool(rewire=False)) == ""
    assert chosen(pod("p", "Missed")) == "p"


@pytest.mark.parametrize(
    "spared",
    [
        pod("p", wired=True),
        pod("p", "Missed", owner=""),
        pod("p", "Missed", deleting=True),
        pod("p", "Missed", made_s=-10),
        *(pod("p", r) for r in Skip if r not in (Skip.POOL_NOT_READY, Skip.NAMESPACE_NOT_ALLOWED)),
        *(pod("p", r, wired=True) for r in Note),
    ],
    ids=lambda p: ",".join([*p.reasons, "wired" * p.wired]),
)
def test_who_is_spared(spared: ClientPod) -> None:
    assert chosen(spared) == ""


def test_a_namespace_that_is_still_not_allowed_would_not_be_wired_again_either() -> None:
    stranger = pod("p", Skip.NAMESPACE_NOT_ALLOWED, namespace="other")

    assert not helps(pool(), stranger)
    assert helps(pool(allowed=("other",)), stranger)


def test_the_oldest_goes_first_and_the_next_one_ten_seconds_later() -> None:
    pods = [pod("young", "Missed", owner="a", made_s=-60), pod("old", "OutOfDate", owner="b")]
    history = History()
    assert chosen(*pods, history=history) == "old"
    history.note(pods[1], at(0))

    assert chosen(pods[0], history=history, now_s=9) == ""
    assert chosen(pods[0], history=history, now_s=10) == "young"


def test_an_owners_others_follow_once_its_new_pod_is_wired() -> None:
    first, second = pod("p1", "Missed"), pod("p2", "Missed")
    history = History()
    history.note(first, at(0))

    assert chosen(second, history=history, now_s=60) == "", "nobody knows yet whether admission works again"
    again_unwired = pod("p3", "Missed", made_s=5)
    assert chosen(second, again_unwired, history=history, now_s=60) == ""
    wired = pod("p3", wired=True, made_s=5)
    assert chosen(second, wired, history=history, now_s=60) == "p2"


def test_trials_in_vain_become_ever_rarer() -> None:
    """With admission away for a day one Deployment loses a handful of pods, not thousands."""
    history, now_s, evicted = History(), 0.0, 0
    while now_s < 86400:
        victim = pod(f"p{evicted}", "Missed", made_s=now_s - 60)
        if chosen(victim, history=history, now_s=now_s):
            history.note(victim, at(now_s))
            evicted += 1
        now_s += 30

    assert 5 <= evicted <= 10


class Api:
    """Evicts, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.evicted: list[str] = []
        self.error = error

    async def evict(self, namespace: str, name: str, uid: str) -> bool:
        if self.error is not None:
            raise self.error
        self.evicted.append(f"{namespace}/{name}/{uid}")
        return True


class Run:
    """A Repair and what it did."""

    def __init__(self, error: Exception | None = None) -> None:
        self.api, self.told, self.done, self.now_s = Api(error), [], 0, 0.0
        self.repair = Repair(self.api, lambda: at(self.now_s), self._tell, self._count)  # type: ignore[arg-type]

    async def _tell(self, about: ClientPod, reason: str, text: str) -> None:
        self.told.append((about.owner.name if about.owner else about.name, reason, text))

    def _count(self) -> None:
        self.done += 1

    def look(self, *pods: ClientPod, of: Pool | None = None) -> str:
        return asyncio.run(self.repair(of or pool(rewire=False), pods))


def test_each_owner_is_told_once_as_long_as_it_lasts() -> None:
    run = Run()
    unwired = [pod("p1", "Missed"), pod("p2", "Missed"), pod("alone", Skip.CONTAINER_UNCLEAR, owner="")]

    for _ in range(3):
        run.look(*unwired)
    assert [(who, why) for who, why, _ in run.told] == [("rs", "Missed"), ("alone", "ContainerUnclear")]

    run.look()
    run.look(*unwired)
    assert len(run.told) == 4, "it came back"


def test_what_is_left_to_a_person_is_told_with_the_flag() -> None:
    run = Run()
    run.look(pod("p", Note.SHELL_COMMAND, wired=True), pod("q", Note.STREAMED_INSTEAD, wired=True, owner="b"))

    (_, _, by_hand), (_, _, other) = run.told
    assert "--kv-transfer-config" in by_hand
    assert "--kv-transfer-config" not in other


def test_a_thousand_owners_are_told_a_few_at_a_time() -> None:
    run = Run()
    pods = [pod(f"p{i}", "Missed", owner=f"o{i}") for i in range(50)]

    run.look(*pods)
    assert len(run.told) == 20
    run.look(*pods)
    run.look(*pods)
    assert len({who for who, _, _ in run.told}) == len(run.told) == 50


def test_an_eviction_is_counted_and_is_of_that_very_pod() -> None:
    run = Run()

    assert run.look(pod("p", "Missed"), of=pool()) == ""

    assert run.api.evicted == ["models/p/p"]
    assert run.done == 1


@pytest.mark.parametrize("error", [Busy("a budget"), Forbidden("no right")])
def test_what_keeps_a_pod_from_being_evicted_is_said_and_tried_again(error: Exception) -> None:
    run = Run(error)

    assert str(error) in run.look(pod("p", "Missed"), of=pool())
    run.api.error = None
    assert run.look(pod("p", "Missed"), of=pool()) == ""
    assert run.api.evicted


def test_a_pool_that_is_gone_is_forgotten() -> None:
    run = Run()
    run.look(pod("p", "Missed"))

    run.repair.forget(pool().uid)
    run.look(pod("p", "Missed"))

    assert len(run.told) == 2
