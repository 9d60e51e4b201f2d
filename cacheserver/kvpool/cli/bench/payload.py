# SPDX-License-Identifier: Apache-2.0
"""Token chains, and bytes that carry the identity of their chunk, so that a load can be compared byte by byte. Pure."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.model.identity import Namespace
from kvpool.model.keys import BLAKE3_CHAIN, DIGEST_BYTES, chunk_digests, root_digest

__all__ = ["Chain", "Payload", "bench_namespace", "make_chain"]

VOCABULARY: Final = 128_000
OFFSETS: Final = 1 << 16
"""Chunks take their bytes from this many places of the noise; the digest stamped over them tells the rest apart."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One prompt."""

    name: str
    tokens: NDArray[np.uint32]
    digests: bytes

    @property
    def chunks(self) -> int:
        """Full chunks of the prompt."""
        return len(self.digests) // DIGEST_BYTES

    def digest(self, chunk: int) -> bytes:
        """Return the digest of one chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]


def bench_namespace(shard_bytes: int, seed: int) -> Namespace:
    """Return a namespace of the bench's own: what it stores never meets an engine's chunks."""
    return Namespace(
        model="kvpool-bench",
        model_fingerprint=f"seed-{seed}",
        dtype="bytes",
        kv_dtype="bytes",
        layout=f"bench-{shard_bytes}",
        hash_algorithm=BLAKE3_CHAIN,
    )


def make_chain(namespace: Namespace, number: int, tokens: int, chunk_tokens: int, seed: int) -> Chain:
    """Return prompt *number* of the run: the same in every process, unlike every other one from its first token on."""
    ids = np.random.default_rng((seed, number)).integers(0, VOCABULARY, tokens, dtype=np.uint32)
    return Chain(f"bench-{seed}-{number}", ids, chunk_digests(root_digest(namespace), ids, chunk_tokens))


class Payload:
    """Makes and checks the bytes of chunks of one size."""

    def __init__(self, shard_bytes: int, seed: int) -> None:
        """Draw the noise that all chunks are cut from."""
        self.shard_bytes = shard_bytes
        self._noise = np.random.default_rng(seed).integers(0, 256, shard_bytes + OFFSETS, dtype=np.uint8)

    def fill(self, digest: bytes, out: NDArray[np.uint8]) -> None:
        """Write the chunk's bytes into *out*, shape (shard_bytes,)."""
        start = int.from_bytes(digest[:8], "little") % OFFSETS
        out[:] = self._noise[start : start + self.shard_bytes]
        stamp = np.frombuffer(digest, np.uint8)[: self.shard_bytes]
        out[: len(stamp)] = stamp
        out[-len(stamp) :] = stamp

    def same(self, digest: bytes, data: NDArray[np.uint8]) -> bool:
        """Return True if *data* is the chunk's bytes, every one of them."""
        expected = np.empty(self.shard_bytes, np.uint8)
        self.fill(digest, expected)
        return bool(np.array_equal(expected, data))
