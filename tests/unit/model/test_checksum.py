# SPDX-License-Identifier: Apache-2.0
"""Checksums tell changed bytes from the same bytes, in every kind."""

import pytest

from kvpool.model import checksum as module
from kvpool.model.checksum import CHECKSUM_BYTES, ChecksumKind, can_verify, checksum


@pytest.mark.parametrize("kind", [ChecksumKind.XXH3, ChecksumKind.BLAKE3])
def test_any_changed_byte_changes_the_checksum(kind: ChecksumKind) -> None:
    data = bytearray(range(256)) * 16
    before = checksum(data, kind)
    assert len(before) == CHECKSUM_BYTES
    assert checksum(memoryview(bytes(data)), kind) == before

    for at in (0, 1, 2047, len(data) - 1):
        data[at] ^= 1
        assert checksum(data, kind) != before
        data[at] ^= 1


def test_none_is_zero() -> None:
    assert checksum(b"anything", ChecksumKind.NONE) == bytes(CHECKSUM_BYTES)
    assert not can_verify(ChecksumKind.NONE)


def test_without_xxhash_its_kind_is_refused_and_blake3_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "xxhash", None)

    assert not can_verify(ChecksumKind.XXH3)
    assert can_verify(ChecksumKind.BLAKE3)
    with pytest.raises(ValueError, match="xxhash"):
        checksum(b"x", ChecksumKind.XXH3)
