# SPDX-License-Identifier: Apache-2.0
"""Paged caches in device memory as engines lay them out, and random ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.transfer.planes import Layout, PagedTensor, Plane, layout_of

BLOCKS = 48


def tensor(name: str, shape: tuple[int, ...], item: int, *, storage: int, order: Sequence[int] = ()) -> PagedTensor:
    """A dense tensor; *order* lists its dimensions from the slowest to the fastest."""
    strides, step = [0] * len(shape), item
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return PagedTensor(
        name=name, storage=storage, offset=0, shape=shape, strides=tuple(strides), item_bytes=item, packing="p"
    )


def engine_layouts() -> dict[str, Layout]:
    """Name to layout: heads, orders, dtypes and kinds that engines are known to use."""
    split = [tensor(f"l{n}", (BLOCKS, 2, 16, 8, 128), 2, storage=n, order=(1, 0, 2, 3, 4)) for n in range(4)]
    joined = [tensor(f"l{n}", (BLOCKS, 2, 16, 8, 128), 2, storage=n) for n in range(4)]
    eight_bit = [tensor(f"l{n}", (BLOCKS, 2, 16, 1, 128), 1, storage=n, order=(1, 0, 2, 3, 4)) for n in range(4)]
    latent = [tensor(f"l{n}", (BLOCKS, 64, 576), 2, storage=n) for n in range(4)]
    odd = [tensor(f"l{n}", (BLOCKS, 16, 656), 1, storage=n) for n in range(4)]
    kernel_blocks = [tensor("l0", (BLOCKS * 4, 16, 8, 64), 2, storage=0)]
    cross = [
        PagedTensor(
            name=f"l{n}",
            storage=0,
            offset=n * 32768,
            shape=(BLOCKS, 16384),
            strides=(4 * 32768, 2),
            item_bytes=2,
            packing="p",
        )
        for n in range(4)
    ]
    padded_state = [
        PagedTensor(
            name="state", storage=0, offset=0, shape=(BLOCKS, 68608), strides=(131072, 1), item_bytes=1, packing="p"
        )
    ]
    made = {
        "keys and values apart": split,
        "blocks first": joined,
        "fp8, one head": eight_bit,
        "latent": latent,
        "latent with scales, fp8": odd,
        "kernel blocks": kernel_blocks,
        "cross-layer": cross,
        "padded state": padded_state,
    }
    return {name: layout_of(tensors, BLOCKS, 16) for name, tensors in made.items()}


def random_layout(rng: np.random.Generator) -> Layout:
    """Planes of different sizes, with gaps, at any address, over one to three storages."""
    unit = int(rng.choice([1, 2, 4, 8, 16]))
    ends = [0] * int(rng.integers(1, 4))
    planes = []
    for number in range(int(rng.integers(1, 9))):
        storage = int(rng.integers(len(ends)))
        size = unit * int(rng.integers(1, 2000))
        stride = size + unit * int(rng.integers(0, 3))
        offset = ends[storage] + unit * int(rng.integers(0, 3))
        planes.append(
            Plane(name=str(number), storage=storage, offset=offset, stride=stride, block_bytes=size, packing="p")
        )
        ends[storage] = offset + BLOCKS * stride
    return Layout(planes=tuple(planes), blocks=BLOCKS, block_tokens=16)


def storages_of(layout: Layout, rng: np.random.Generator) -> list[Any]:
    """Device memory with random bytes for each storage of a layout."""
    import torch

    count = max(p.storage for p in layout.planes) + 1
    ends = [0] * count
    for plane in layout.planes:
        ends[plane.storage] = max(
            ends[plane.storage], plane.offset + (layout.blocks - 1) * plane.stride + plane.block_bytes
        )
    return [torch.from_numpy(rng.integers(0, 256, max(1, end), dtype=np.uint8)).cuda() for end in ends]


def on_host(storages: Sequence[Any]) -> list[np.ndarray]:
    return [s.cpu().numpy().copy() for s in storages]
