# SPDX-License-Identifier: Apache-2.0
"""What admission knows of pools follows the API server, through changes, breaks and lists."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpool_operator.admission.pools import Pools
from kvpool_operator.errors import Busy

Event = tuple[str, dict[str, Any]]


def body(name: str, version: int, *, size: str = "1Gi", key: str = "", namespace: str = "models") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"l1": {"size": size}}, "status": {"serverKey": key}}


class Script:
    """Stands for the API server: lists, and between them watches, each a list of events that ends or breaks."""

    def __init__(self, *lists: tuple[list[dict[str, Any]], list[list[Event]]]) -> None:
        self._lists = list(lists)
        self._watches: list[list[Event]] = []
        self.asked: list[str] = []
        self.done = asyncio.Event()

    async def snapshot(self, _kind: Any, _namespace: str) -> tuple[list[dict[str, Any]], str]:
        if not self._lists:
            self.done.set()
            await asyncio.Event().wait()
        items, self._watches = self._lists.pop(0)
        return items, "100"

    async def watch(self, _kind: Any, _namespace: str, version: str) -> AsyncIterator[Event]:
        self.asked.append(version)
        if not self._watches:
            raise Busy("too old")
        for event in self._watches.pop(0):
            yield event


def follow(script_of: Callable[[], Script]) -> tuple[Pools, Script]:
    async def run() -> tuple[Pools, Script]:
        script = script_of()
        pools = Pools(script, ())  # type: ignore[arg-type]
        assert not pools.synced
        task = asyncio.create_task(pools.run())
        async with asyncio.timeout(10):
            await script.done.wait()
        task.cancel()
        return pools, script

    return asyncio.run(run())


def key_of(pools: Pools, name: str) -> str | None:
    known = pools.get(("models", name))
    return None if known is None else known[1]


def test_what_is_listed_and_what_changes_is_known() -> None:
    events = [("ADDED", body("b", 101)), ("MODIFIED", body("a", 102, key="k")), ("DELETED", body("c", 103))]

    pools, script = follow(lambda: Script(([body("a", 1), body("c", 2)], [events])))

    assert pools.synced
    assert (key_of(pools, "a"), key_of(pools, "b"), key_of(pools, "c")) == ("k", "", None)
    assert script.asked == ["100", "103"], "the next watch goes on where the last one ended"


def test_bookmarks_move_the_version_and_nothing_else() -> None:
    mark: Event = ("BOOKMARK", {"metadata": {"resourceVersion": "500"}})

    pools, script = follow(lambda: Script(([body("a", 1)], [[mark]])))

    assert key_of(pools, "a") == ""
    assert script.asked == ["100", "500"]


def test_after_a_break_the_list_replaces_what_was_known() -> None:
    pools, _ = follow(lambda: Script(([body("a", 1), body("gone", 2)], [[]]), ([body("a", 9, key="new")], [])))

    assert (key_of(pools, "a"), key_of(pools, "gone")) == ("new", None)


@pytest.mark.parametrize("size", ["much", "-1"])
def test_a_pool_that_cannot_be_read_counts_as_not_there(size: str) -> None:
    pools, _ = follow(lambda: Script(([body("a", 1), body("b", 2)], [[("MODIFIED", body("a", 101, size=size))]])))

    assert key_of(pools, "a") is None
    assert key_of(pools, "b") == ""
