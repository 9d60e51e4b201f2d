# SPDX-License-Identifier: Apache-2.0
"""What `kvpool doctor` tries of a GPU, on one."""

import pytest

from kvpool.cli.doctor.gpus import gpus_facts

SLOWEST = 1e9


def test_each_whole_device_can_do_what_movers_need() -> None:
    found = gpus_facts("/dev/shm").gpus

    for gpu in found:
        if gpu.mig:
            pytest.skip("this device is cut into instances")
        assert not gpu.problem
        assert not gpu.handle_problem
        assert not gpu.descriptor_problem
        assert not gpu.pinning_problem
        assert min(gpu.store_bytes_per_s, gpu.load_bytes_per_s) > SLOWEST
