# SPDX-License-Identifier: Apache-2.0
"""Digests of a request's chunks: from the engine's own block hashes where they are wide, else from its tokens.

The engine's hashes chain the whole prefix and cover salt, multimodal content and prompt embeddings. Of an adapter they
cover only name and path; its content is mixed in here. A request with something that neither way covers is not cached.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import blake3
import msgspec
import numpy as np

from kvpool.model import keys
from kvpool.model.errors import InvalidRange
from kvpool.model.identity import Namespace
from kvpool.model.keys import DIGEST_BYTES

__all__ = ["ChunkKeys", "EngineRequest"]

_ADAPTER: Final = b"kvpool.adapter.1"


class EngineRequest(Protocol):
    """What the connector reads of a request of the engine."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    resumable: bool
    skip_reading_prefix_cache: bool
    kv_transfer_params: dict[str, Any] | None


class ChunkKeys:
    """Makes digests for one namespace and one size of chunks."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        chunk_tokens: int,
        hash_tokens: int,
        identify_adapter: Callable[[Any], str | None],
    ) -> None:
        """Make it.

        Args:
            namespace: the complete namespace.
            chunk_tokens: tokens of one chunk.
            hash_tokens: tokens of one of the engine's block hashes; 0 to hash the tokens themselves.
            identify_adapter: fingerprint of a request's adapter; None if it cannot be identified.
        """
        self.chunk_tokens = chunk_tokens
        self._hash_tokens = hash_tokens
        self._root = keys.root_digest(namespace)
        self._identify = identify_adapter

    def objection(self, request: EngineRequest) -> str:
        """Say why a request is not cached; empty if it is."""
        if request.resumable:
            return "its prompt grows while it runs"
        if request.lora_request is not None and self._identify(request.lora_request) is None:
            return "its adapter cannot be identified"
        if not self._hash_tokens and request.prompt_embeds is not None:
            return "embeddings in its prompt are not covered by a hash of tokens"
        return ""

    def extend(self, request: EngineRequest, known: bytes, end_tokens: int) -> bytes:
        """Return the digests of all full chunks in the first *end_tokens* tokens, *known* ones first.

        Fewer if the engine has not hashed as many blocks yet; *known* itself if it covers them all, or more.

        Raises:
            InvalidRange: one of the engine's hashes is not 32 bytes wide.
        """
        if len(known) // DIGEST_BYTES >= end_tokens // self.chunk_tokens:
            return known
        if self._hash_tokens:
            return self._from_hashes(request, known, end_tokens // self.chunk_tokens)
        tokens = np.array(request.all_token_ids[:end_tokens], dtype=np.uint32)
        return keys.extend_digests(self._root, known, tokens, self.chunk_tokens, self._extras(request, end_tokens))

    def _from_hashes(self, request: EngineRequest, known: bytes, end: int) -> bytes:
        step = self.chunk_tokens // self._hash_tokens
        hashes = request.block_hashes
        last = [bytes(hashes[i]) for i in range(len(known) // DIGEST_BYTES * step + step - 1, len(hashes), step)]
        fresh = last[: max(0, end - len(known) // DIGEST_BYTES)]
        if any(len(h) != DIGEST_BYTES for h in fresh):
            raise InvalidRange(f"a block hash of the engine is not {DIGEST_BYTES} bytes wide")
        if request.lora_request is not None:
            adapter = _ADAPTER + str(self._identify(request.lora_request)).encode() + b"\0"
            fresh = [blake3.blake3(adapter + h).digest() for h in fresh]
        return known + b"".join(fresh)

    def _extras(self, request: EngineRequest, end_tokens: int) -> list[bytes]:
        """What each chunk depends on besides its tokens; the chain carries it to all that follow."""
        extras = []
        for start in range(0, end_tokens, self.chunk_tokens):
            media = [
                (feature.identifier, feature.mm_position.offset - start)
                for feature in request.mm_features
                if start < feature.mm_position.offset + feature.mm_position.length
                and feature.mm_position.offset < start + self.chunk_tokens
            ]
            whole = self._whole(request) if start == 0 else ()
            extras.append(msgspec.msgpack.encode((whole, media)) if whole or media else b"")
        return extras

    def _whole(self, request: EngineRequest) -> tuple[str, ...]:
        adapter = "" if request.lora_request is None else str(self._identify(request.lora_request))
        return (request.cache_salt or "", adapter) if request.cache_salt or adapter else ()
