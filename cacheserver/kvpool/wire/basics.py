# SPDX-License-Identifier: Apache-2.0
"""What every message is made of: envelopes, bases, the error reply, and kinds of fields."""

from typing import Annotated, Final, Generic, TypeVar

from msgspec import Meta, Struct

__all__ = [
    "REASON_CHARS",
    "Count",
    "Digest",
    "Envelope",
    "Failed",
    "Id128",
    "Reason",
    "Reply",
    "ReplyEnvelope",
    "Request",
    "RequestId",
    "Small",
]

REASON_CHARS: Final = 1024
"""Longest text for people that a client may send; it cuts what is longer."""


Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0)]
Small = Annotated[int, Meta(ge=0, le=65535)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS)]

R = TypeVar("R", bound="Reply")


class Envelope(Struct, frozen=True, array_like=True):
    """Stands before every request."""

    version: int
    request_id: int
    """Chosen by the client; the reply repeats it."""

    deadline_ms: Count
    """How long the client waits for the answer, from the moment it sent."""


class ReplyEnvelope(Struct, frozen=True, array_like=True):
    """Stands before every reply."""

    version: int
    request_id: int
    boot_id: Id128
    """Random id of the server process: another one means that all that was handed out before is void."""


class Reply(Struct, frozen=True, kw_only=True):
    """Base of replies."""


class Request(Struct, Generic[R], frozen=True, kw_only=True):
    """Base of requests; the parameter is the reply."""


class Failed(Reply, frozen=True, kw_only=True, tag="failed"):
    """The request was not done; ``kvpool.model.errors`` has the codes."""

    code: str
    detail: str = ""
