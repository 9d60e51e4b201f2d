# SPDX-License-Identifier: Apache-2.0
"""Move blocks of tensors that vLLM itself laid out, in each of its layouts; writes what happened as JSON.

Runs in the engine's environment. Some layouts put all layers of a block together, or all layers of one head.
"""

import json
import sys

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from kvpool.transfer.host import HostBlocks, map_storages
from kvpool.transfer.planes import layout_of
from kvpool.transfer.tensors import describe_tensors

LAYERS, BLOCKS, TOKENS = ["a", "b", "c"], 16, 32
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=32, dtype=torch.float32)


def allocated(layout: KVCacheLayout) -> dict[str, torch.Tensor]:
    """The engine's views of one allocation with random bytes, by layer."""
    layer_stride, block_stride, *_ = compute_layout_strides(SPEC, BLOCKS, len(LAYERS), layout)
    size = SPEC.page_size_bytes * BLOCKS * len(LAYERS)
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    placed = KVCacheTensor(size=size, layers=LAYERS, layer_stride=layer_stride, block_stride=block_stride)
    return dict(zip(LAYERS, create_kv_cache_views(raw, SPEC, BLOCKS, layout, placed), strict=True))


def check(layout: KVCacheLayout) -> dict[str, object]:
    """Copy two blocks elsewhere through the port; everything else must stay as it was."""
    views = allocated(layout)
    expected = {name: view.clone().view(torch.int32) for name, view in views.items()}
    for view in expected.values():
        view[[2, 1]] = view[[7, 3]]
    tensors, storages = describe_tensors(views, dict.fromkeys(LAYERS, "p"))
    planes = layout_of(tensors, BLOCKS, TOKENS)
    port = HostBlocks([planes], map_storages(storages))
    chunk = bytearray(planes.chunk_bytes(2))
    port.gather(0, np.array([7, 3]), memoryview(chunk))
    port.scatter(0, np.array([2, 1]), 0, memoryview(chunk))
    return {
        "right": all(torch.equal(view.view(torch.int32), expected[name]) for name, view in views.items()),
        "planes": len(planes.planes),
        "block_bytes": planes.block_bytes,
        "distance": planes.planes[0].stride,
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.stdout.write(json.dumps({layout.name: check(layout) for layout in KVCacheLayout}) + "\n")
