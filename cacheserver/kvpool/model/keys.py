# SPDX-License-Identifier: Apache-2.0
"""What makes two chunks the same: the one key builder for lookup, store, load, free and tiers.

A chunk's digest is 32 bytes: keyed BLAKE3 of its tokens, the key being its parent's digest. So it covers every token
before it, and equal digests mean equal prefixes. What else a chunk depends on is mixed into the key first.
Clients make digests in one of two ways, and the way is part of the namespace (``Namespace.hash_algorithm``):

* ``BLAKE3_CHAIN``: this module's chain over token ids;
* an engine's own block hashes where they are wide and process-independent: the hash of a chunk's last block.

The server scopes every digest by tenant and namespace (``scope_digest``), so a client can name nobody else's chunks.
"""

from collections.abc import Sequence
from typing import Final

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.model.errors import InvalidRange
from kvpool.model.identity import Namespace

__all__ = [
    "BLAKE3_CHAIN",
    "DIGEST_BYTES",
    "KEY_VERSION",
    "chunk_digests",
    "digest_list",
    "extend_digests",
    "root_digest",
    "scope_digest",
    "self_test",
]

DIGEST_BYTES: Final = 32
KEY_VERSION: Final = b"kvpool.key.2"
BLAKE3_CHAIN: Final = "blake3-chain-2"

_EXTRA: Final = (KEY_VERSION + b".extra").decode()
_ROOT: Final = KEY_VERSION + b".root"
_SCOPE: Final = KEY_VERSION + b".scope"


def root_digest(namespace: Namespace) -> bytes:
    """Return the parent of every first chunk of *namespace*: deterministic over processes, hosts and hash seeds."""
    return blake3.blake3(_ROOT + msgspec.msgpack.encode(namespace)).digest()


def scope_digest(tenant: str, namespace: Namespace) -> bytes:
    """Return the 32 bytes under which the server files all chunks of one tenant in one namespace."""
    return blake3.blake3(_SCOPE + msgspec.msgpack.encode((tenant, namespace))).digest()


def chunk_digests(
    root: bytes, tokens: NDArray[np.uint32], chunk_tokens: int, extra_keys: Sequence[bytes] = ()
) -> bytes:
    """Chain the full chunks of *tokens*.

    Args:
        root: ``root_digest`` of the namespace.
        tokens: token ids, shape (n,).
        chunk_tokens: tokens of one chunk.
        extra_keys: for each chunk, what else its content depends on (salt, adapter, multimodal hashes with their
            offsets); shorter than the number of chunks means nothing extra for the rest.

    Returns:
        The digests of the ``n // chunk_tokens`` full chunks, concatenated, 32 bytes each.
    """
    return extend_digests(root, b"", tokens, chunk_tokens, extra_keys)


def extend_digests(
    root: bytes, known: bytes, tokens: NDArray[np.uint32], chunk_tokens: int, extra_keys: Sequence[bytes] = ()
) -> bytes:
    """As ``chunk_digests``, continuing after the chunks whose digests are *known*; returns all of them.

    Raises:
        InvalidRange: *known* is no whole number of digests, or covers more chunks than *tokens* has.
    """
    done, rest = divmod(len(known), DIGEST_BYTES)
    total = len(tokens) // chunk_tokens
    if rest or done > total:
        raise InvalidRange(f"{len(known)} bytes of known digests do not fit {total} chunks")
    rest_tokens = np.ascontiguousarray(tokens[done * chunk_tokens : total * chunk_tokens], dtype="<u4")
    chunks = rest_tokens.view(f"V{chunk_tokens * 4}").tolist()
    extras = extra_keys[done:total]
    parent = known[-DIGEST_BYTES:] if known else root
    out, hashed = [known], blake3.blake3
    for chunk, extra in zip(chunks, extras, strict=False):
        if extra:
            # Another mode of BLAKE3 than the chunks', so that no extra can be read as tokens.
            parent = hashed(parent + extra, derive_key_context=_EXTRA).digest()
        parent = hashed(chunk, key=parent).digest()
        out.append(parent)
    # One call a chunk and nothing else: 512 of them are most of what a first lookup of 128k tokens costs.
    for chunk in chunks[len(extras) :]:
        parent = hashed(chunk, key=parent).digest()
        out.append(parent)
    return b"".join(out)


def digest_list(frame: bytes | memoryview) -> list[bytes]:
    """Split a frame of concatenated digests.

    Raises:
        InvalidRange: the frame is no whole number of digests.
    """
    if len(frame) % DIGEST_BYTES:
        raise InvalidRange(f"{len(frame)} bytes are no whole number of {DIGEST_BYTES}-byte digests")
    items: list[bytes] = np.frombuffer(frame, dtype=f"V{DIGEST_BYTES}").tolist()
    return items


def self_test() -> bytes:
    """Return the digest of a fixed input; both ends of a handshake must make the same."""
    tokens = np.arange(24, dtype=np.uint32) * np.uint32(0x01010101)
    namespace = Namespace(
        model="self-test", model_fingerprint="f", dtype="d", kv_dtype="k", layout="l", hash_algorithm=BLAKE3_CHAIN
    )
    chain = chunk_digests(root_digest(namespace), tokens, 8, (b"", b"extra"))
    return blake3.blake3(chain + scope_digest("tenant", namespace)).digest()
