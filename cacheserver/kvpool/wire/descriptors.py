# SPDX-License-Identifier: Apache-2.0
"""The descriptor socket: how a client of the same node gets arena segments to map.

A Unix stream socket beside the request socket (its path plus ``SUFFIX``). Messages are length-prefixed: four bytes
little-endian, then the msgpack of one struct below. The client sends Attach with the ticket of its Welcome first, then
any number of MapRegion; each request has exactly one reply, in order. A Region reply carries one file descriptor
(SCM_RIGHTS) with its first byte. The client keeps the connection for its whole life: its end and the handle of the
process that made it tell the server when the client died.
"""

from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvpool.model.errors import Malformed
from kvpool.wire.basics import Count, Failed, Id128

__all__ = [
    "MAX_BYTES",
    "SUFFIX",
    "AnyDescriptorReply",
    "AnyDescriptorRequest",
    "Attach",
    "Granted",
    "MapRegion",
    "Region",
    "pack",
    "take_reply",
    "take_request",
]

SUFFIX: Final = ".fd"
MAX_BYTES: Final = 4096
"""Longest message of either side, without its prefix."""

_PREFIX_BYTES: Final = 4


class Attach(Struct, frozen=True, kw_only=True, tag="attach"):
    """First message: binds this connection to the client whose Hello was given *ticket*."""

    ticket: Id128


class Granted(Struct, frozen=True, kw_only=True, tag="granted"):
    """Answer to Attach."""

    boot_id: Id128
    regions: Count
    region_bytes: Count
    """Length of every region; offsets in placements count from a region's start."""


class MapRegion(Struct, frozen=True, kw_only=True, tag="map_region"):
    """Asks for the descriptor of one region's memory; *writable* only for regions that this client stores to."""

    memory: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """The number in a placement. A region whose memory was replaced has another one, and the old one is refused."""

    writable: bool = False


class Region(Struct, frozen=True, kw_only=True, tag="region"):
    """Answer to MapRegion, with one file descriptor: map it from offset 0, *length* bytes."""

    memory: Count
    length: Count
    writable: bool


AnyDescriptorRequest = Attach | MapRegion
AnyDescriptorReply = Granted | Region | Failed

M = TypeVar("M")

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(AnyDescriptorRequest).decode
_reply = msgspec.msgpack.Decoder(AnyDescriptorReply).decode


def pack(message: AnyDescriptorRequest | AnyDescriptorReply) -> bytes:
    """Return *message* with its length before it, ready to be written."""
    body = _encode(message)
    return len(body).to_bytes(_PREFIX_BYTES, "little") + body


def take_request(buffer: bytearray) -> AnyDescriptorRequest | None:
    """Remove the first request from *buffer*; None if it is not complete yet.

    Raises:
        Malformed: it does not decode or is too long; the connection cannot be used any more.
    """
    return _taken(buffer, _request)


def take_reply(buffer: bytearray) -> AnyDescriptorReply | None:
    """As ``take_request``, for replies."""
    return _taken(buffer, _reply)


def _taken(buffer: bytearray, decode: Callable[[bytes], M]) -> M | None:
    body = _take(buffer)
    if body is None:
        return None
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as e:
        raise Malformed(f"descriptor message: {e}") from e


def _take(buffer: bytearray) -> bytes | None:
    if len(buffer) < _PREFIX_BYTES:
        return None
    length = int.from_bytes(buffer[:_PREFIX_BYTES], "little")
    if length > MAX_BYTES:
        raise Malformed(f"descriptor message of {length} bytes; at most {MAX_BYTES}")
    end = _PREFIX_BYTES + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[_PREFIX_BYTES:end])
    del buffer[:end]
    return body
