# SPDX-License-Identifier: Apache-2.0
"""Frames to messages: whatever arrives becomes a message or one of two errors."""

from contextlib import suppress
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.model.errors import Malformed, UnknownRequest, VersionMismatch
from kvpool.model.slots import PLACEMENT
from kvpool.wire import codec
from kvpool.wire.messages import AnyReply, AnyRequest, Envelope, Ping, Pong, Reply, ReplyEnvelope, Request
from kvpool.wire.versions import VERSION_MAX, VERSION_MIN, agree


@example(b"\x81\xa4type\xa4ping")
@example(b"\x81\xa4type\xc0")
@example(b"\x91" * 2000)
@example(b"\x81\xa4type\xa2\xff\xfe")
@given(st.binary(max_size=200))
def test_any_body_decodes_or_is_refused(body: bytes) -> None:
    with suppress(Malformed, UnknownRequest):
        assert isinstance(codec.decode_request(body), Request)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_frames_have_an_envelope_or_are_refused(frames: list[bytes]) -> None:
    for decode in (codec.decode_envelope, codec.decode_reply):
        with suppress(Malformed):
            decode(frames)


def test_an_unknown_tag_is_told_from_a_broken_body() -> None:
    with pytest.raises(UnknownRequest, match="blend"):
        codec.decode_request(msgspec.msgpack.encode({"type": "blend"}))
    with pytest.raises(Malformed):
        codec.decode_request(msgspec.msgpack.encode({"type": "lookup"}))


def test_unknown_optional_fields_are_ignored() -> None:
    assert codec.decode_request(msgspec.msgpack.encode({"type": "ping", "added_later": 1})) == Ping()


def test_a_reply_comes_back_with_its_envelope() -> None:
    envelope = ReplyEnvelope(1, 7, bytes(16))

    assert codec.decode_reply(codec.encode_reply(envelope, Pong())) == (envelope, Pong())


def test_a_negative_deadline_is_malformed() -> None:
    frames = [msgspec.msgpack.encode([1, 2, -1]), b""]
    with pytest.raises(Malformed, match="envelope"):
        codec.decode_envelope(frames)
    assert codec.decode_envelope([msgspec.msgpack.encode([1, 2, 3]), b""]) == Envelope(1, 2, 3)


@pytest.mark.parametrize("read", [codec.placements_of, codec.flags_of, codec.checksums_of])
def test_raw_frames_have_exactly_their_length(read: object) -> None:
    with pytest.raises(Malformed, match="bytes instead of"):
        read(bytes(7), 2)  # type: ignore[operator]


def test_placements_come_back() -> None:
    rows = np.zeros(2, dtype=PLACEMENT)
    rows["offset"] = [4096, 8192]

    assert (codec.placements_of(rows.tobytes(), 2) == rows).all()


def test_each_request_names_a_reply_of_the_protocol() -> None:
    replies = set(get_args(AnyReply))
    for request in get_args(AnyRequest):
        (reply,) = get_args(request.__orig_bases__[0])
        assert issubclass(reply, Reply)
        assert reply in replies, f"{request.__name__} names {reply.__name__}, which is no reply of the protocol"


@pytest.mark.parametrize(
    ("theirs", "chosen"), [((VERSION_MIN, VERSION_MAX), VERSION_MAX), ((0, VERSION_MAX + 9), VERSION_MAX)]
)
def test_the_highest_common_version_is_chosen(theirs: tuple[int, int], chosen: int) -> None:
    assert agree(*theirs) == chosen


@pytest.mark.parametrize("theirs", [(VERSION_MAX + 1, VERSION_MAX + 2), (0, VERSION_MIN - 1)])
def test_no_common_version_is_refused_with_both_ranges(theirs: tuple[int, int]) -> None:
    with pytest.raises(VersionMismatch, match=f"{theirs[0]} to {theirs[1]}"):
        agree(*theirs)
