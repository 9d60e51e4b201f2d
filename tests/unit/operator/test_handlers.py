# SPDX-License-Identifier: Apache-2.0
"""What events make of the queue, and how watches on another thread are told to end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import kopf
import pytest

from kvpool_operator import handlers
from kvpool_operator.desired.names import POOL_LABEL
from kvpool_operator.handlers import Stop, StuckError, Watcher
from kvpool_operator.kept import EVERYTHING, Part
from kvpool_operator.queue import Need
from kvpool_operator.settings import Settings


def meta(name: str = "a", generation: int = 1, namespace: str = "models", **labels: str) -> dict[str, Any]:
    return {"namespace": namespace, "name": name, "uid": name, "generation": generation, "labels": labels}


@pytest.fixture
def asked() -> list[tuple[tuple[str, str], Need, Part]]:
    return []


@pytest.fixture
def watcher(asked: list[tuple[tuple[str, str], Need, Part]]) -> Watcher:
    return Watcher(lambda *what: asked.append(what))


def test_a_new_spec_is_urgent_and_our_own_status_asks_for_nothing(watcher: Watcher, asked: list[Any]) -> None:
    watcher.pool_seen(meta(), deleted=False)
    watcher.pool_seen(meta(), deleted=False)
    watcher.pool_seen(meta(generation=2), deleted=False)
    watcher.pool_seen(meta(generation=2), deleted=True)

    assert asked == [(("models", "a"), Need.NOW, EVERYTHING)] * 3


def test_a_namesake_of_a_deleted_pool_is_a_new_one(watcher: Watcher, asked: list[Any]) -> None:
    watcher.pool_seen(meta(), deleted=False)
    watcher.pool_seen({**meta(), "uid": "another"}, deleted=False)

    assert len(asked) == 2


def test_what_a_pool_owns_names_it(watcher: Watcher, asked: list[Any]) -> None:
    watcher.owned_seen(meta("kvpool-a-node", **{POOL_LABEL: "a"}))

    assert asked == [(("models", "a"), Need.SOON, Part.CHILDREN)]


def test_a_server_asks_for_a_look_at_servers_alone(watcher: Watcher, asked: list[Any]) -> None:
    watcher.server_seen(meta("kvpool-a-x7k2p", **{POOL_LABEL: "a"}))

    assert asked == [(("models", "a"), Need.SOMETIME, Part.SERVERS)]


def test_a_daemon_set_whose_status_counts_on_is_only_to_be_reported(watcher: Watcher, asked: list[Any]) -> None:
    made = meta("kvpool-a", **{POOL_LABEL: "a"})
    watcher.daemon_set_seen(made, deleted=False)
    watcher.daemon_set_seen(made, deleted=False)
    watcher.daemon_set_seen({**made, "generation": 2}, deleted=False)
    watcher.daemon_set_seen({**made, "generation": 2}, deleted=True)

    whole = Need.SOON, Part.SERVERS | Part.CHILDREN
    assert [what for _, *what in asked] == [[*whole], [Need.SOMETIME, Part.SERVERS], [*whole], [*whole]]


def test_a_daemon_set_that_somebody_labelled_is_to_be_repaired(watcher: Watcher, asked: list[Any]) -> None:
    made = meta("kvpool-a", **{POOL_LABEL: "a"})
    watcher.daemon_set_seen(made, deleted=False)
    watcher.daemon_set_seen({**made, "annotations": {"somebody": "else"}}, deleted=False)
    watcher.daemon_set_seen({**made, "labels": {POOL_LABEL: "a", "more": "x"}}, deleted=False)

    assert [need for _, need, _ in asked] == [Need.SOON] * 3


def test_a_client_names_every_pool_of_that_name(watcher: Watcher, asked: list[Any]) -> None:
    watcher.pool_seen(meta("a", namespace="x"), deleted=False)
    watcher.pool_seen(meta("a", namespace="y"), deleted=False)
    watcher.pool_seen(meta("b", namespace="x"), deleted=False)
    asked.clear()

    watcher.client_seen(meta("vllm-0", namespace="z", **{POOL_LABEL: "a"}))

    what = Need.SOMETIME, Part.CLIENTS
    assert sorted(asked, key=lambda a: a[0]) == [(("x", "a"), *what), (("y", "a"), *what)]


def test_kopf_writes_nothing_and_waits_for_nothing_forever() -> None:
    settings = kopf.OperatorSettings()
    handlers.configure(settings)

    assert not settings.posting.enabled
    assert settings.process.ultimate_exiting_timeout is None, "it would kill the process after a restart of the watches"
    assert None not in (settings.watching.client_timeout, settings.watching.inactivity_timeout)
    assert sum(settings.networking.error_backoffs) > 300
    assert max(settings.networking.error_backoffs) <= 30


def test_an_event_costs_no_copy_of_its_object() -> None:
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    storage, body = settings.persistence.diffbase_storage, kopf.Body({"spec": {"containers": [{"name": "engine"}]}})

    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None


@pytest.mark.parametrize("early", [True, False])
def test_a_stop_reaches_watches_on_another_thread(early: bool) -> None:
    stop, started = Stop(), threading.Event()

    async def watch() -> None:
        with stop.flag() as flag:
            started.set()
            async with asyncio.timeout(10):
                await flag.wait()

    thread = threading.Thread(target=lambda: asyncio.run(watch()))
    if early:
        stop.set()
    thread.start()
    assert started.wait(10)
    stop.set()
    thread.join(10)

    assert not thread.is_alive()
    stop.set()  # nobody there any more


def test_watches_need_no_name_of_the_user_that_the_pod_runs_as(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    async def spawn(**given: Any) -> list[Any]:
        assert given["identity"] == "pod-7"
        return []

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.setattr("kopf.spawn_tasks", spawn)

    handlers.operate(handlers.Watcher(lambda *_: None), Settings(identity="pod-7"), Stop())


async def fails() -> None:
    raise OSError("410 Gone")


async def ends() -> None:
    """As kopf's own watch over the stop flag."""


class Deaf:
    """A watch that overhears that it is cancelled, so often."""

    def __init__(self, times: int) -> None:
        self.times, self.ended = times, False

    async def run(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.times -= 1
                if self.times < 0:
                    self.ended = True
                    raise


@pytest.fixture
def operate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``handlers.operate`` with kopf's own end, but other watches."""

    def run(*watches: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def spawn(**_: Any) -> list[asyncio.Task[None]]:
            return [asyncio.create_task(watch()) for watch in watches]

        monkeypatch.setattr("kopf.spawn_tasks", spawn)
        handlers.operate(Watcher(lambda *_: None), Settings(identity="pod-7"), Stop(), end_s=0.2)

    return run


def test_what_ends_kopf_is_raised(operate: Callable[..., None]) -> None:
    watch = Deaf(0)

    with pytest.raises(OSError, match="410 Gone"):
        operate(fails, watch.run)

    assert watch.ended


def test_a_watch_that_overhears_the_end_does_not_keep_the_others_from_beginning_anew(
    operate: Callable[..., None],
) -> None:
    """kopf cancels each of its tasks once, and waits for them without a deadline."""
    watch = Deaf(1)

    with pytest.raises(StuckError, match=r"within 0\.2 s of OSError.'410 Gone'"):
        operate(fails, watch.run)

    assert watch.ended


def test_a_watch_that_never_ends_is_left_behind(operate: Callable[..., None]) -> None:
    watch = Deaf(10**6)

    with pytest.raises(StuckError, match="of its stop"):
        operate(ends, watch.run)

    assert not watch.ended
