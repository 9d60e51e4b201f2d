# SPDX-License-Identifier: Apache-2.0
"""Which mode a client gets, and what people are told of those that it does not get."""

import pytest

from kvpool.model.errors import LayoutRefused
from kvpool.model.identity import Mode
from kvpool.server.sessions import _choose

RING, MAPPED, MOVED, STREAMED = Mode.RING, Mode.MAPPED, Mode.CLIENT_MOVED, Mode.STREAMED
POSSIBLE = {mode: mode.value for mode in Mode}
NONE, NO_CACHE = "the client has none", "the client exports no cache"


@pytest.mark.parametrize(
    ("offered", "missing", "chosen"),
    [
        ((RING, MAPPED, STREAMED), {}, (RING, "ring")),
        ((RING, STREAMED), {MAPPED: NO_CACHE}, (RING, "ring")),
        ((RING, MAPPED, STREAMED), {RING: "3 MiB are free"}, (MAPPED, "mapped; no ring: 3 MiB are free")),
        ((MAPPED, STREAMED), {RING: NONE}, (MAPPED, "mapped")),
        ((MAPPED, STREAMED), {RING: "needs Triton"}, (MAPPED, "mapped; no ring: needs Triton")),
        ((MAPPED, STREAMED), {RING: NONE, MAPPED: "off"}, (STREAMED, "streamed; not mapped: off")),
        ((RING, MAPPED, MOVED), {RING: "off", MAPPED: "off"}, (MOVED, "client-moved; no ring: off; not mapped: off")),
        ((STREAMED, MAPPED), {RING: NONE, MAPPED: "off"}, (STREAMED, "streamed")),
        ((MOVED, STREAMED), {RING: NONE, MAPPED: NO_CACHE}, (MOVED, "client-moved")),
        ((), {RING: NONE, MAPPED: NO_CACHE}, (STREAMED, "the client moves no bytes")),
    ],
)
def test_the_first_that_both_can_do_with_the_reasons_for_what_was_wanted_before_it(
    offered: tuple[Mode, ...], missing: dict[Mode, str], chosen: tuple[Mode, str]
) -> None:
    assert _choose(offered, POSSIBLE, missing) == chosen


def test_a_client_that_can_do_nothing_else_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="moves bytes by mapped"):
        _choose((MAPPED,), POSSIBLE, {MAPPED: "off"})
