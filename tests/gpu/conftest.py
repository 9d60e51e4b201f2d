# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder need a CUDA device, torch and Triton; without them they are skipped with the reason.

A real engine brings its own torch, see ``test_vllm``.
"""

import pytest

from kvpool.transfer.mover.inventory import InventoryError, visible_gpus


def missing_device() -> str:
    try:
        return "" if visible_gpus() else "no CUDA device is visible"
    except InventoryError as e:
        return str(e)


def missing() -> str:
    if reason := missing_device():
        return reason
    try:
        import torch
        import triton
    except ImportError as e:
        return str(e)
    return "" if torch.cuda.is_available() and triton else "torch cannot use the device"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    alone, with_torch = missing_device(), missing()
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if reason := alone if "/test_vllm.py" in item.nodeid else with_torch:
                item.add_marker(pytest.mark.skip(reason=reason))
