# SPDX-License-Identifier: Apache-2.0
"""Who a client is and what its chunks belong to."""

from enum import StrEnum

import msgspec

__all__ = ["ClientKind", "GroupKind", "GroupSpec", "Mode", "Namespace", "Role"]


class ClientKind(StrEnum):
    """What a client does."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    PROBE = "probe"


class Role(StrEnum):
    """Which directions a client may use; enforced on both ends."""

    BOTH = "both"
    PRODUCER = "producer"
    CONSUMER = "consumer"

    @property
    def stores(self) -> bool:
        """True if this role may store."""
        return self is not Role.CONSUMER

    @property
    def loads(self) -> bool:
        """True if this role may look up and load."""
        return self is not Role.PRODUCER


class Mode(StrEnum):
    """How bytes meet, fastest first; see docs/architecture.md."""

    RING = "ring"
    MAPPED = "mapped"
    CLIENT_MOVED = "client-moved"
    STREAMED = "streamed"


class GroupKind(StrEnum):
    """What a cache group needs so that a prefix can be restored."""

    FULL = "full"
    """Every chunk of the prefix."""

    WINDOW = "window"
    """The chunks that cover the last ``window_tokens`` of the prefix."""

    STATE = "state"
    """The last chunk of the prefix alone."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group of a registered layout."""

    kind: GroupKind
    shard_bytes: int
    """Bytes of one rank's part of one chunk; what a slot must hold."""

    window_tokens: int = 0
    """Tokens of the window; 0 unless the kind is WINDOW."""


class Namespace(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything that must be equal for two engines to share chunks, but the tokens themselves.

    The tenant is not in it: the server takes that from the client's identity. Field order is part of the key; a field
    may only be appended, with a default, together with a new ``keys.KEY_VERSION``.
    """

    model: str
    """The model's name, for people; the fingerprint is what counts."""

    model_fingerprint: str
    """Hub commit, or a fingerprint of configuration and weights; never a path alone."""

    dtype: str
    kv_dtype: str
    layout: str
    """Hex fingerprint of planes, bytes per block, heads, head size, block tokens and kernel packing."""

    hash_algorithm: str
    """How digests were made (``keys.BLAKE3_CHAIN`` or an engine's own wide, seedless block hash)."""

    shard_count: int = 1
    """Shards that a chunk is split into over the ranks of the engine."""

    parallel: str = ""
    """How ranks split the cache (TP, PP, context parallel), in one canonical text."""

    adapter: str = ""
    """Identity of an adapter that the digests themselves do not cover."""
