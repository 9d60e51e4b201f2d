# SPDX-License-Identifier: Apache-2.0
"""Messages of the descriptor socket, as they arrive on a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.model.errors import Malformed
from kvpool.wire.descriptors import (
    MAX_BYTES,
    Attach,
    Granted,
    MapRegion,
    Region,
    pack,
    take_reply,
    take_request,
)
from kvpool.wire.messages import Failed

REQUESTS = [Attach(ticket=bytes(16)), MapRegion(memory=0), MapRegion(memory=7, writable=True)]
REPLIES = [
    Granted(boot_id=bytes(16), regions=3, region_bytes=1 << 30),
    Region(memory=1, length=4096, writable=False),
    Failed(code="busy", detail="x"),
]


def drain(buffer, take):
    found = []
    while (message := take(buffer)) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize(("messages", "take"), [(REQUESTS, take_request), (REPLIES, take_reply)])
def test_a_heap_of_messages_comes_out_in_order(messages, take):
    buffer = bytearray(b"".join(map(pack, messages)))

    assert drain(buffer, take) == messages
    assert not buffer


@given(st.lists(st.sampled_from(REQUESTS), max_size=4), st.lists(st.integers(1, 30), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_messages(messages, sizes):
    data, buffer, found = b"".join(map(pack, messages)), bytearray(), []
    at = step = 0
    while at < len(data):
        size = sizes[step % len(sizes)]
        buffer += data[at : at + size]
        at, step = at + size, step + 1
        found += drain(buffer, take_request)

    assert found == messages


@pytest.mark.parametrize(
    "data",
    [
        (MAX_BYTES + 1).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        b"\1\0\0\0\xc1",
        b"\0\0\0\0",
        pack(Region(memory=0, length=1, writable=False)),
        (4015).to_bytes(4, "little") + b"\x82\xa4type\xa6attach\xa1x" + b"\x91" * 4000,
    ],
)
def test_what_is_no_request_is_malformed(data):
    with pytest.raises(Malformed):
        take_request(bytearray(data))


@given(st.binary(max_size=64))
def test_random_bytes_never_raise_anything_else(data):
    for take in (take_request, take_reply):
        buffer = bytearray(data)
        try:
            drain(buffer, take)
        except Malformed:
            continue
