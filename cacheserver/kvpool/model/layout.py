# SPDX-License-Identifier: Apache-2.0
"""A block is opaque bytes: a layout is a list of planes; layouts with equal fingerprints may share chunks."""

from typing import Final

import blake3
import msgspec

__all__ = ["NOWHERE", "PlaneSpec", "layout_fingerprint", "layouts_fingerprint"]

NOWHERE: Final = -1
"""In a chunk's blocks: there is none here. It is gathered as zeros and scattered nowhere, and may occur any number of
times."""


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


def layouts_fingerprint(groups: tuple[tuple[str, int, tuple[PlaneSpec, ...]], ...], chunk_tokens: int) -> str:
    """Return the hex fingerprint of a layout of several cache groups.

    Args:
        groups: for each group its kind, its window in tokens (0 for none) and its planes, in order.
        chunk_tokens: tokens of one chunk.
    """
    return blake3.blake3(b"kvpool.layouts.1" + msgspec.msgpack.encode((groups, chunk_tokens))).hexdigest()
