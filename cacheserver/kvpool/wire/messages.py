# SPDX-License-Identifier: Apache-2.0
"""Every request and every reply, declared once.

A message is an envelope, a body and raw frames, in this order:

    request: [ENVELOPE] [BODY] [raw frame ...]        reply: [REPLY ENVELOPE] [BODY] [raw frame ...]

The body is the msgpack of one struct below. Arrays of numbers and bytes of chunks travel as raw frames, little-endian,
never inside the body; each message says which ones it has. A tag once released is never used again for something else;
a field may be added with a default, never removed or changed in meaning within a protocol version.

Chunk ranges are half-open, counted from the start of the token sequence.
"""

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from kvpool.model.identity import ClientKind, GroupSpec, Mode, Namespace, Role

__all__ = [
    "AnyReply",
    "AnyRequest",
    "AttachBulk",
    "Attached",
    "Bytes",
    "Clear",
    "Cleared",
    "CommitRetrieve",
    "CommitStore",
    "EndRequest",
    "Ended",
    "Envelope",
    "Failed",
    "Found",
    "FreeLookup",
    "Freed",
    "Hello",
    "Limits",
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
    "Statistics",
    "Stats",
    "Stored",
    "Unregister",
    "Unregistered",
    "Welcome",
    "WriteChunk",
    "Wrote",
]

Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0)]
Small = Annotated[int, Meta(ge=0, le=65535)]

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


class Limits(Struct, frozen=True, kw_only=True):
    """What the server takes from one client."""

    frame_bytes: int
    chunks: int
    in_flight: int
    bulk_window: int


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello."""

    version: int
    server_id: str
    server_version: str
    chunk_tokens: int
    tenant: str
    """Taken from the client's identity, never from its word."""

    limits: Limits
    heartbeat_s: float
    lookup_lease_s: float
    store_lease_s: float
    ticket: Id128
    """Binds the bulk connection and the descriptor socket to this client."""

    descriptor_socket: str = ""
    """Path of the Unix socket that hands out segments; empty if the client came over TCP."""

    identity_expires_s: float | None = None
    """Seconds until the credential must be renewed."""

    plain_bulk_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port of the same host for a bulk connection without encryption; 0 if there is none."""

    features: tuple[str, ...] = ()


class Hello(Request[Welcome], frozen=True, kw_only=True, tag="hello"):
    """First message of a control connection; again after a reply with another boot id."""

    version_min: int
    version_max: int
    kind: ClientKind
    client_id: Id128
    self_test: Digest
    role: Role = Role.BOTH
    client_version: str = ""
    label: Annotated[str, Meta(max_length=253)] = ""
    credential: Annotated[str, Meta(max_length=16384)] = ""
    """A service-account token or the shared secret; never logged."""

    features: tuple[str, ...] = ()


class Attached(Reply, frozen=True, kw_only=True, tag="attached"):
    """Answer to AttachBulk."""


class AttachBulk(Request[Attached], frozen=True, kw_only=True, tag="attach_bulk"):
    """First message of a bulk connection: binds it to the client whose Hello was given *ticket*."""

    ticket: Id128


class Renewed(Reply, frozen=True, kw_only=True, tag="renewed"):
    """Answer to Renew."""

    identity_expires_s: float | None


class Renew(Request[Renewed], frozen=True, kw_only=True, tag="renew"):
    """Replaces the credential before it expires; it must be of the same tenant."""

    credential: Annotated[str, Meta(max_length=16384)]


class Registered(Reply, frozen=True, kw_only=True, tag="registered"):
    """Answer to Register."""

    mode: Mode
    """How this client's bytes will move."""

    reason: str
    """Why that mode, for people."""


class Register(Request[Registered], frozen=True, kw_only=True, tag="register"):
    """Declares what a client caches; a second one replaces the first.

    A scheduler registers the same namespace and groups as its workers and all of their shards.
    """

    namespace: Namespace
    groups: Annotated[tuple[GroupSpec, ...], Meta(min_length=1, max_length=64)]
    shards: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=1024)]
    readers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks on this server that each load the same shard (MLA)."""

    modes: tuple[Mode, ...] = ()
    """What the client can do, in order of preference; empty for one that moves no bytes."""


class Unregistered(Reply, frozen=True, kw_only=True, tag="unregistered"):
    """Answer to Unregister."""

    known: bool


class Unregister(Request[Unregistered], frozen=True, kw_only=True, tag="unregister"):
    """Ends the client: its leases, its writes under way and its connections."""


class Found(Reply, frozen=True, kw_only=True, tag="found"):
    """Answer to Lookup and LookupStatus."""

    chunks: Count
    """Length of the prefix that is pinned for the lookup, in chunks."""

    coming: Count = 0
    """Chunks right behind it that another client or a tier is still bringing; 0 means that the answer is final."""

    reason: str = ""
    """Why the prefix ends there: a ``kvpool.model.reasons.LookupReason``."""


class Lookup(Request[Found], frozen=True, kw_only=True, tag="lookup"):
    """Longest prefix that all *shards* (and all groups) hold; pins it. Raw frames: digests (32 bytes a chunk).

    A second lookup of the same request replaces the first one.
    """

    request_id: RequestId
    lookup_id: Id128
    shards: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=1024)] = (0,)


class LookupStatus(Request[Found], frozen=True, kw_only=True, tag="lookup_status"):
    """How a lookup stands now; waits up to *wait_s* for it to become final."""

    lookup_id: Id128
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class Freed(Reply, frozen=True, kw_only=True, tag="freed"):
    """Answer to FreeLookup."""

    chunks: Count
    """Chunks of which this call released a pin; 0 if all were free before."""


class FreeLookup(Request[Freed], frozen=True, kw_only=True, tag="free_lookup"):
    """Unpins chunks [first, end) of a lookup, in all groups and shards; idempotent, unknown ids leave a tombstone."""

    lookup_id: Id128
    first: Count = 0
    end: Annotated[int, Meta(ge=0, le=1 << 31)] = 1 << 31


class Prepared(Reply, frozen=True, kw_only=True, tag="prepared"):
    """Answer to PrepareStore. Raw frames: placements (``kvpool.model.slots.PLACEMENT``, one a chunk)."""

    write: Count
    """Chunks to be written."""


class PrepareStore(Request[Prepared], frozen=True, kw_only=True, tag="prepare_store"):
    """Asks where chunks [first, first + n) go. Raw frames: digests (32 bytes a chunk).

    Chunks that are there already or that another client is writing are not to be sent.
    """

    request_id: RequestId
    store_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    parent: Annotated[bytes, Meta(max_length=32)] = b""
    """Digest of chunk first - 1; empty when first is 0 (or unknown)."""


class Wrote(Reply, frozen=True, kw_only=True, tag="wrote"):
    """Answer to WriteChunk; gives its credit back."""


class WriteChunk(Request[Wrote], frozen=True, kw_only=True, tag="write_chunk"):
    """Streamed mode: one piece of one chunk's bytes. Raw frames: the piece.

    Pieces of a chunk are sent in order, without gaps.
    """

    store_id: Id128
    chunk: Count
    offset: Count


class Stored(Reply, frozen=True, kw_only=True, tag="stored"):
    """Answer to CommitStore. Raw frames: u1 dispositions (STORED, ABANDONED, or what Prepared said), one a chunk."""

    stored: Count


class CommitStore(Request[Stored], frozen=True, kw_only=True, tag="commit_store"):
    """Ends a store. Raw frames: u1 a chunk of the PrepareStore (1: its bytes are complete), then 16-byte checksums.

    After it the client writes to none of the slots again. Chunks not marked complete are dropped.
    """

    store_id: Id128
    checksum_kind: Annotated[int, Meta(ge=0, le=255)] = 0


class Readable(Reply, frozen=True, kw_only=True, tag="readable"):
    """Answer to PrepareRetrieve. Raw frames: placements, 16-byte checksums, u1 kinds (0: none, or not to verify)."""

    chunks: Count


class PrepareRetrieve(Request[Readable], frozen=True, kw_only=True, tag="prepare_retrieve"):
    """Asks where chunks [first, end) of a lookup lie, for one group and shard."""

    lookup_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    end: Count


class Bytes(Reply, frozen=True, kw_only=True, tag="bytes"):
    """Answer to ReadChunk. Raw frames: the piece."""


class ReadChunk(Request[Bytes], frozen=True, kw_only=True, tag="read_chunk"):
    """Streamed mode: one piece of one chunk's bytes."""

    lookup_id: Id128
    chunk: Count
    offset: Count
    length: Annotated[int, Meta(ge=1)]
    group: Small = 0
    shard: Small = 0


class Retrieved(Reply, frozen=True, kw_only=True, tag="retrieved"):
    """Answer to CommitRetrieve. Raw frames: u1 dispositions (VOUCHED or LOST), one a chunk."""

    vouched: Count


class CommitRetrieve(Request[Retrieved], frozen=True, kw_only=True, tag="commit_retrieve"):
    """Ends the reading of chunks [first, end) by one reader and asks whether the bytes were the chunks' all along.

    Only vouched bytes may be used. Raw frames: u1 a chunk (1: the client found its checksum wrong). The reader's pins
    on the range are released.
    """

    lookup_id: Id128
    group: Small = 0
    shard: Small = 0
    first: Count = 0
    end: Count


class Ended(Reply, frozen=True, kw_only=True, tag="ended"):
    """Answer to EndRequest."""

    leases: Count
    """Lookups and stores that this ended."""


class EndRequest(Request[Ended], frozen=True, kw_only=True, tag="end_request"):
    """The engine is done with a request: all its lookups are freed. Idempotent; leaves a tombstone.

    A store under way is not cut off by it: its writer commits or abandons it.
    """

    request_id: RequestId


class Cleared(Reply, frozen=True, kw_only=True, tag="cleared"):
    """Answer to Clear."""

    chunks: Count
    kept: Count
    """Chunks that stayed because somebody holds them."""


class Clear(Request[Cleared], frozen=True, kw_only=True, tag="clear"):
    """Drops the chunks of the caller's tenant; with *forced* also those that are pinned (their loads will fail)."""

    model: str = ""
    """Only namespaces of this model; empty means all."""

    forced: bool = False


class Statistics(Reply, frozen=True, kw_only=True, tag="statistics"):
    """Answer to Stats: numbers without any client's name; counters count since the server's start."""

    server_id: str
    server_version: str
    uptime_s: float
    ready: bool
    draining: bool
    chunk_tokens: int
    l1_bytes: int
    l1_used_bytes: int
    l1_pinned_bytes: int
    chunks: int
    clients: int
    sessions: int
    leases: int
    oldest_lease_s: float
    counters: dict[str, float]
    """Metric name with labels as in the exposition format, e.g. ``kvpool_lookups_total{result="hit"}``."""


class Stats(Request[Statistics], frozen=True, kw_only=True, tag="stats"):
    """Numbers of the server; needs a Hello of any kind."""


class Pong(Reply, frozen=True, kw_only=True, tag="pong"):
    """Answer to Ping."""


class Ping(Request[Pong], frozen=True, kw_only=True, tag="ping"):
    """Shows that the client lives; needs a Hello."""


AnyRequest = (
    Hello
    | AttachBulk
    | Renew
    | Register
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
    | Stats
    | Ping
)

AnyReply = (
    Failed
    | Welcome
    | Attached
    | Renewed
    | Registered
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
    | Statistics
    | Pong
)
