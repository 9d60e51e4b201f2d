# SPDX-License-Identifier: Apache-2.0
"""Frames to messages and back. Decoding raises Malformed or UnknownRequest and nothing else."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.model.checksum import CHECKSUM_BYTES
from kvpool.model.errors import BY_CODE, CacheError, Malformed, UnknownRequest
from kvpool.model.slots import PLACEMENT
from kvpool.wire.messages import AnyReply, AnyRequest, Envelope, Failed, Reply, ReplyEnvelope, Request

__all__ = [
    "checksums_of",
    "decode_envelope",
    "decode_reply",
    "decode_request",
    "encode_failure",
    "encode_reply",
    "encode_request",
    "error_of",
    "flags_of",
    "placements_of",
]

Buffer = bytes | bytearray | memoryview

MIN_FRAMES: Final = 2

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(Envelope).decode
_reply_envelope = msgspec.msgpack.Decoder(ReplyEnvelope).decode
_request = msgspec.msgpack.Decoder(AnyRequest).decode
_reply = msgspec.msgpack.Decoder(AnyReply).decode
_TAGS: Final = frozenset(cls.__struct_config__.tag for cls in AnyRequest.__args__)


def encode_request(envelope: Envelope, request: Request[Any]) -> list[bytes]:
    """Return the envelope's and the body's frame."""
    return [_encode(envelope), _encode(request)]


def encode_reply(envelope: ReplyEnvelope, reply: Reply) -> list[bytes]:
    """Return the envelope's and the body's frame."""
    return [_encode(envelope), _encode(reply)]


def decode_envelope(frames: Sequence[Buffer]) -> Envelope:
    """Read a request's envelope, so that even a body that does not decode can be answered.

    Raises:
        Malformed: there are too few frames, or the envelope is none.
    """
    if len(frames) < MIN_FRAMES:
        raise Malformed(f"{len(frames)} frames; a request has an envelope and a body")
    try:
        return _envelope(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as e:
        raise Malformed(f"envelope: {e}") from e


def decode_request(body: Buffer) -> Request[Any]:
    """Read a request's body.

    Raises:
        UnknownRequest: the tag is none of this version.
        Malformed: the body does not decode.
    """
    try:
        request: Request[Any] = _request(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as e:
        if (tag := _tag(body)) is not None and tag not in _TAGS:
            raise UnknownRequest(f"{tag!r} is no request of this version") from e
        raise Malformed(f"body: {e}") from e
    return request


def decode_reply(frames: Sequence[Buffer]) -> tuple[ReplyEnvelope, Reply]:
    """Read a reply.

    Raises:
        Malformed: it does not decode.
    """
    if len(frames) < MIN_FRAMES:
        raise Malformed(f"{len(frames)} frames; a reply has an envelope and a body")
    try:
        return _reply_envelope(frames[0]), _reply(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as e:
        raise Malformed(f"reply: {e}") from e


def encode_failure(error: CacheError) -> Failed:
    """Return the reply that carries *error*."""
    return Failed(code=error.code, detail=str(error))


def error_of(failed: Failed) -> CacheError:
    """Return the exception that a Failed reply carries; an unknown code becomes the base class."""
    return BY_CODE.get(failed.code, CacheError)(failed.detail)


def placements_of(frame: Buffer, count: int) -> NDArray[np.void]:
    """Read *count* placements.

    Raises:
        Malformed: the frame has another length.
    """
    _expect(frame, count * PLACEMENT.itemsize, "placements")
    return np.frombuffer(frame, dtype=PLACEMENT)


def flags_of(frame: Buffer, count: int) -> NDArray[np.uint8]:
    """Read one byte for each of *count* chunks.

    Raises:
        Malformed: the frame has another length.
    """
    _expect(frame, count, "flags")
    return np.frombuffer(frame, dtype=np.uint8)


def checksums_of(frame: Buffer, count: int) -> NDArray[np.void]:
    """Read *count* checksums.

    Raises:
        Malformed: the frame has another length.
    """
    _expect(frame, count * CHECKSUM_BYTES, "checksums")
    return np.frombuffer(frame, dtype=f"V{CHECKSUM_BYTES}")


def _expect(frame: Buffer, size: int, what: str) -> None:
    if len(frame) != size:
        raise Malformed(f"{what}: {len(frame)} bytes instead of {size}")


def _tag(body: Buffer) -> str | None:
    """Return the tag of a body that does not decode as a known request, if it has one."""
    try:
        raw = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, ValueError):
        return None
    tag = raw.get("type") if isinstance(raw, dict) else None
    return tag if isinstance(tag, str) else None
