# SPDX-License-Identifier: Apache-2.0
"""The list of a pool's servers: what it says, and how seldom it is written."""

from kvpool.model.whereabouts import candidates
from kvpool_operator.observed import DaemonSetState, ServerPod
from kvpool_operator.whereabouts import Whereabouts, complete, listed


def pod(number: int, *, ip: str = "", ready: bool = True, deleting: bool = False, revision: str = "r") -> ServerPod:
    return ServerPod(
        name=f"s{number}",
        uid=f"{number}",
        node=f"n{number}",
        ip=ip or f"192.0.2.{number}",
        ready=ready,
        deleting=deleting,
        revision=revision,
    )


def state(desired: int, *, observed: int = 2) -> DaemonSetState:
    return DaemonSetState(generation=2, observed_generation=observed, desired=desired, revision="r")


def test_the_list_names_servers_by_their_nodes() -> None:
    text = listed([pod(2), pod(1, ip="2001:db8::1"), pod(3, deleting=True), pod(4, ready=False)], 7410)

    assert text == "tcp://[2001:db8::1]:7410#n1\ntcp://192.0.2.2:7410#n2\ntcp://192.0.2.4:7410#n4\n"
    assert candidates(text.splitlines(), "n2") == ("tcp://192.0.2.2:7410",)
    assert listed([ServerPod(name="s", uid="u", node="n")], 7410) == "", "it has no address yet"


def test_a_list_beyond_what_an_object_holds_ends_with_a_whole_line() -> None:
    text = listed([pod(i, ip=f"2001:db8::{i:x}") for i in range(30_000)], 7410)

    assert 500_000 < len(text) <= 512 << 10
    assert text.endswith("\n")


def test_all_are_there_when_each_wanted_one_is_ready_and_new() -> None:
    assert complete(state(2), [pod(1), pod(2)])
    for others in ([pod(1)], [pod(1), pod(2, ready=False)], [pod(1), pod(2, revision="old")]):
        assert not complete(state(2), others)
    assert not complete(state(2, observed=1), [pod(1), pod(2)])
    assert not complete(None, [])


def test_a_rollout_is_written_once_at_its_end() -> None:
    places = Whereabouts()
    assert not places.follow("old", 0.0, all_there=True), "what was first seen goes with the other objects"

    written = [places.follow(f"step {i}", float(i), all_there=False) for i in range(1, 100)]
    assert not any(written)
    assert places.text == "old"
    assert places.follow("new", 100.0, all_there=True)
    assert places.text == "new"


def test_a_pool_at_rest_writes_nothing() -> None:
    places = Whereabouts()
    places.follow("same", 0.0, all_there=True)

    assert not any(places.follow("same", float(s), all_there=True) for s in range(0, 7200, 10))


def test_a_pool_that_never_comes_to_rest_is_written_from_time_to_time() -> None:
    places = Whereabouts()
    places.follow("0", 0.0, all_there=False)

    times = [s for s in range(1, 3601) if places.follow(f"{s}", float(s), all_there=False)]

    assert times == [600, 1200, 1800, 2400, 3000, 3600]
