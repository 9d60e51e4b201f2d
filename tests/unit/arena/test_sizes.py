# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.arena.sizes import sizes_of
from kvpool.config import L1Config

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("size", "regions", "region"),
    [
        (16 * MIB, 4, 4 * MIB),
        (1 * GIB, 32, 32 * MIB),
        (8 * GIB, 32, 256 * MIB),
        (10 * GIB, 40, 256 * MIB),
        (64 * GIB, 64, 1 * GIB),
        (1024 * GIB, 1024, 1 * GIB),
    ],
)
def test_automatic_regions(size: int, regions: int, region: int) -> None:
    sizes = sizes_of(L1Config(size_bytes=size))

    assert (sizes.regions, sizes.region_bytes, sizes.data_bytes) == (regions, region, size)


@given(st.integers(16 * MIB, 1 << 42))
def test_never_more_than_asked_and_hardly_less(size: int) -> None:
    sizes = sizes_of(L1Config(size_bytes=size))

    assert size - sizes.region_bytes < sizes.data_bytes <= size
    assert 4 * MIB <= sizes.region_bytes <= GIB
    assert sizes.data_bytes > size * 31 // 32 or size < 128 * MIB


def test_configured_regions_are_taken_as_they_are() -> None:
    sizes = sizes_of(L1Config(size_bytes=100 * MIB, segment_bytes=30 * MIB))

    assert (sizes.regions, sizes.region_bytes) == (3, 30 * MIB)
    assert sizes.stride == 30 * MIB // 4096
