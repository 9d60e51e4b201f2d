# SPDX-License-Identifier: Apache-2.0
"""Every request and every reply: declared once, in the modules of their topics, gathered here.

A message is an envelope, a body and raw frames, in this order:

    request: [ENVELOPE] [BODY] [raw frame ...]        reply: [REPLY ENVELOPE] [BODY] [raw frame ...]

The body is the msgpack of one struct. Arrays of numbers and bytes of chunks travel as raw frames, little-endian,
never inside the body; each message says which ones it has. A tag once released is never used again for something else;
a field may be added with a default, never removed or changed in meaning within a protocol version.

Chunk ranges are half-open, counted from the start of the token sequence.
"""

from kvpool.wire.basics import Envelope, Failed, Reply, ReplyEnvelope, Request
from kvpool.wire.events import Events, Subscribe
from kvpool.wire.hello import AttachBulk, Attached, Hello, Limits, Renew, Renewed, Welcome
from kvpool.wire.lookups import Ended, EndRequest, Found, Freed, FreeLookup, Lookup, LookupStatus
from kvpool.wire.registration import (
    CacheFacts,
    Register,
    Registered,
    RingFacts,
    RingNews,
    RingState,
    Unregister,
    Unregistered,
    WatchRing,
)
from kvpool.wire.retrieves import Bytes, CommitRetrieve, PrepareRetrieve, Readable, ReadChunk, Retrieved
from kvpool.wire.stores import CommitStore, Prepared, PrepareStore, Stored, WriteChunk, Wrote
from kvpool.wire.upkeep import Clear, Cleared, Locate, Located, Ping, Pong, Statistics, Stats

__all__ = [
    "AnyReply",
    "AnyRequest",
    "AttachBulk",
    "Attached",
    "Bytes",
    "CacheFacts",
    "Clear",
    "Cleared",
    "CommitRetrieve",
    "CommitStore",
    "EndRequest",
    "Ended",
    "Envelope",
    "Events",
    "Failed",
    "Found",
    "FreeLookup",
    "Freed",
    "Hello",
    "Limits",
    "Locate",
    "Located",
    "Lookup",
    "LookupStatus",
    "Ping",
    "Pong",
    "PrepareRetrieve",
    "PrepareStore",
    "Prepared",
    "ReadChunk",
    "Readable",
    "Register",
    "Registered",
    "Renew",
    "Renewed",
    "Reply",
    "ReplyEnvelope",
    "Request",
    "Retrieved",
    "RingFacts",
    "RingNews",
    "RingState",
    "Statistics",
    "Stats",
    "Stored",
    "Subscribe",
    "Unregister",
    "Unregistered",
    "WatchRing",
    "Welcome",
    "WriteChunk",
    "Wrote",
]

AnyRequest = (
    Hello
    | AttachBulk
    | Renew
    | Register
    | WatchRing
    | Unregister
    | Lookup
    | LookupStatus
    | FreeLookup
    | PrepareStore
    | WriteChunk
    | CommitStore
    | PrepareRetrieve
    | ReadChunk
    | CommitRetrieve
    | EndRequest
    | Clear
    | Subscribe
    | Stats
    | Locate
    | Ping
)

AnyReply = (
    Failed
    | Welcome
    | Attached
    | Renewed
    | Registered
    | RingNews
    | Unregistered
    | Found
    | Freed
    | Prepared
    | Wrote
    | Stored
    | Readable
    | Bytes
    | Retrieved
    | Ended
    | Cleared
    | Events
    | Statistics
    | Located
    | Pong
)
