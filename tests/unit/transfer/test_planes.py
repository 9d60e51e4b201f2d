# SPDX-License-Identifier: Apache-2.0
"""Planes of the layouts that engines are known to use."""

import pytest

from kvpool.model.layout import layout_fingerprint
from kvpool.transfer.planes import LayoutError, PagedTensor, layout_of


def dense(name: str, shape: tuple[int, ...], *, offset: int = 0, order: tuple[int, ...] | None = None) -> PagedTensor:
    """A bfloat16 tensor that fills its memory; *order* lists dimensions from the slowest to the fastest."""
    order = order or tuple(range(len(shape)))
    strides = [0] * len(shape)
    step = 2
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return PagedTensor(
        name=name, storage=0, offset=offset, shape=shape, strides=tuple(strides), item_bytes=2, packing="p"
    )


def test_heads_first_layer_is_one_plane() -> None:
    layout = layout_of([dense("a", (16, 4, 32, 64)), dense("b", (16, 4, 32, 64), offset=262144)], 16, 32)

    assert [(p.offset, p.stride, p.block_bytes) for p in layout.planes] == [(0, 16384, 16384), (262144, 16384, 16384)]
    assert layout.block_bytes == 32768
    assert layout.chunk_bytes(8) == 8 * 32768


def test_inner_order_does_not_matter_for_the_runs() -> None:
    layout = layout_of([dense("a", (16, 4, 32, 64), order=(0, 2, 1, 3))], 16, 32)

    assert [(p.stride, p.block_bytes) for p in layout.planes] == [(16384, 16384)]


def test_keys_and_values_apart_are_two_planes() -> None:
    apart = dense("a", (16, 2, 32, 64), order=(1, 0, 2, 3))

    layout = layout_of([apart], 16, 32)

    assert [(p.name, p.offset, p.block_bytes) for p in layout.planes] == [("a.0", 0, 4096), ("a.1", 65536, 4096)]


def test_blocks_across_layers_keep_their_distance() -> None:
    inside = PagedTensor(
        name="a", storage=0, offset=4096, shape=(16, 2048), strides=(8192, 2), item_bytes=2, packing="p"
    )

    (plane,) = layout_of([inside], 16, 32).planes

    assert (plane.offset, plane.stride, plane.block_bytes) == (4096, 8192, 4096)


def test_kernel_blocks_are_regrouped() -> None:
    (plane,) = layout_of([dense("a", (64, 32, 64))], 16, 128).planes

    assert (plane.stride, plane.block_bytes) == (4 * 4096, 4 * 4096)


def test_kernel_blocks_with_gaps_become_planes() -> None:
    padded = PagedTensor(name="a", storage=0, offset=0, shape=(8, 16), strides=(48, 2), item_bytes=2, packing="p")

    layout = layout_of([padded], 4, 32)

    assert [(p.offset, p.stride, p.block_bytes) for p in layout.planes] == [(0, 96, 32), (48, 96, 32)]


def test_a_layer_that_shares_memory_is_left_out() -> None:
    layout = layout_of([dense("a", (16, 64)), dense("shares a", (16, 64))], 16, 32)

    assert [p.name for p in layout.planes] == ["a"]


@pytest.mark.parametrize(
    ("tensors", "blocks", "words"),
    [
        ([], 16, "no cache tensors"),
        ([dense("a", (17, 64))], 16, "17 rows are no multiple of 16 blocks"),
        ([dense("a", (16, 0))], 16, "no elements"),
        (
            [PagedTensor(name="a", storage=0, offset=0, shape=(4, 8), strides=(8, 2), item_bytes=2, packing="p")],
            4,
            "overlap",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(tensors: list[PagedTensor], blocks: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        layout_of(tensors, blocks, 32)


def test_fingerprint_moves_with_everything_but_the_address() -> None:
    base = layout_of([dense("a", (16, 64))], 16, 32)
    moved = layout_of([dense("a", (16, 64), offset=4096)], 16, 32)
    others = [
        layout_of([dense("b", (16, 64))], 16, 32),
        layout_of([dense("a", (16, 128))], 16, 32),
        layout_of([dense("a", (16, 64))], 16, 16),
        layout_of([dense("a", (16, 64)), dense("b", (16, 64), offset=9000)], 16, 32),
    ]

    fingerprint = layout_fingerprint(base.specs(), 256)

    assert layout_fingerprint(moved.specs(), 256) == fingerprint
    assert fingerprint not in [layout_fingerprint(o.specs(), 256) for o in others]
    assert layout_fingerprint(base.specs(), 512) != fingerprint
