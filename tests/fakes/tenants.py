# SPDX-License-Identifier: Apache-2.0
"""Two engines of two tenants at one server: neither reads, clears or fills what is the other's."""

import os

from tests.fakes.clients import CHUNK_BYTES, FakeEngine, digests

KEPT = 24
"""Chunks of the first tenant; well within its share."""
BLOCKS = 512
"""What each engine needs for the chunks that it stores, and beside them for those that it loads."""
BATCH = 30
"""Chunks of one store."""


def hits(engine: FakeEngine, keys: bytes) -> int:
    """How many chunks the engine is told of; it keeps no pin."""
    request = os.urandom(4).hex()
    found = engine.lookup(keys, request).chunks
    engine.scheduler.end(request)
    return int(found)


def check_bytes(engine: FakeEngine, keys: bytes) -> None:
    """All chunks of *keys* are there, as they are in the engine's blocks from 0 on."""
    request = os.urandom(4).hex()
    count = len(keys) // 32
    answer = engine.lookup(keys, request)
    assert answer.chunks == count
    engine.blocks.memory[count * 8 :] = 0
    assert engine.load(answer, count * 8, request_id=request) == frozenset()
    assert (engine.bytes_of(count * 8, count) == engine.bytes_of(0, count)).all()
    engine.scheduler.end(request)


def check_apart(mine: FakeEngine, theirs: FakeEngine, share_bytes: int, model: str = "m") -> None:
    """Both are healthy; each has a share of *share_bytes* and the same model, prompts and names as the other."""
    keys = digests(KEPT, "prompt")
    mine.blocks.fill(1)
    mine.store(keys)
    check_bytes(mine, keys)

    assert hits(theirs, keys) == 0, "it reads nothing"

    theirs.blocks.fill(2)
    for call in theirs.scheduler.clear(model):
        assert call.result()[0].chunks == 0, "it clears nothing"
    theirs.store(keys)
    check_bytes(mine, keys)
    check_bytes(theirs, keys)
    for call in theirs.scheduler.clear(model):
        assert call.result()[0].chunks == KEPT, "its own"
    check_bytes(mine, keys)

    batches = 4 * share_bytes // CHUNK_BYTES // BATCH
    for number in range(batches):
        theirs.store(digests(BATCH, f"flood {number}"), request_id=f"flood {number}")
    last = digests(BATCH, f"flood {batches - 1}")
    assert hits(theirs, last) == BATCH, "within its share it makes room for itself"
    held = sum(hits(theirs, digests(BATCH, f"flood {number}")) for number in range(batches))
    assert held * CHUNK_BYTES <= share_bytes, "it fills its own share"
    check_bytes(mine, keys)

    more = digests(KEPT, "another prompt")
    mine.store(more, request_id="more")
    check_bytes(mine, more)
    check_bytes(mine, keys)
