# SPDX-License-Identifier: Apache-2.0
"""The contract of all ways of moving bytes, over real movers, kernels and copy engines."""

import tempfile
from pathlib import Path

import pytest
from tests.contract.test_transfer_contract import *  # noqa: F403 - its tests, over the fixtures below
from tests.contract.test_transfer_contract import BLOCKS, LEASE_S, engine, way
from tests.fakes.server_process import ServerProcess
from tests.gpu.contract import GpuEngine
from tests.integration.test_client_moved_device import (
    test_copy_engines_move_to_and_from_the_arena_once_it_is_locked,
)

__all__ = [
    "engine",
    "new_engine",
    "server",
    "test_copy_engines_move_to_and_from_the_arena_once_it_is_locked",
    "way",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = {"frame_bytes": (64 << 10) + 4096, "bulk_window": 3}
    leases = {"lookup_s": LEASE_S, "store_s": LEASE_S}
    # Only memory on a tmpfs can be registered with CUDA.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        l1 = {"directory": memory, "allow_disk": False}
        with ServerProcess(Path(tmp_path_factory.mktemp("server")), limits=limits, leases=leases, l1=l1) as server:
            yield server


@pytest.fixture
def new_engine(server, way, request):
    def make(mode=way, **options):
        return GpuEngine(server.address, mode, blocks=BLOCKS, model=request.node.name, **options)

    return make
