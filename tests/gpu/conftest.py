# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder need a CUDA device, torch and Triton; without them they are skipped with the reason."""

import pytest

from kvpool.transfer.mover.inventory import InventoryError, visible_gpus


def missing() -> str:
    try:
        if not visible_gpus():
            return "no CUDA device is visible"
        import torch
        import triton
    except (InventoryError, ImportError) as e:
        return str(e)
    return "" if torch.cuda.is_available() and triton else "torch cannot use the device"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
