# SPDX-License-Identifier: Apache-2.0
"""A block is opaque bytes: a layout is a list of planes; layouts with equal fingerprints may share chunks."""

import blake3
import msgspec

__all__ = ["PlaneSpec", "layout_fingerprint"]


class PlaneSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One plane of a paged cache, without its address: what one layer keeps for one block."""

    name: str
    """Canonical name (layer, and key or value where they are apart)."""

    block_bytes: int
    """Bytes of one block in this plane."""

    block_tokens: int
    packing: str
    """What decides how a kernel arranges the bytes (shape, order, dtype, instruction set)."""


def layout_fingerprint(planes: tuple[PlaneSpec, ...], chunk_tokens: int) -> str:
    """Return the hex fingerprint of a layout: planes in order, and how many tokens a chunk holds."""
    return blake3.blake3(b"kvpool.layout.1" + msgspec.msgpack.encode((planes, chunk_tokens))).hexdigest()
