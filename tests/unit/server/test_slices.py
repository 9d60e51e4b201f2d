# SPDX-License-Identifier: Apache-2.0
"""Short slices are asked of the kernel that runs, and of nothing that it may not be asked of."""

import subprocess
import sys

import pytest

from kvpool.server import slices

READ = """
import os
from kvpool.server.slices import ask_for_short_slices, attributes_of_this_thread as read
before = read()
print(ask_for_short_slices(), before.policy, read().policy, read().nice - before.nice, read().runtime_ns)
"""


def test_the_kernel_knows_of_it_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=30)

    asked, before, after, nicer, runtime_ns = done.stdout.split()
    assert asked == "True"
    assert before == after == "0"
    assert nicer == "0"
    assert int(runtime_ns) in (0, slices.SLICE_S * 1e9), "0: a kernel that keeps no slices"


def test_another_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.platform, "machine", lambda: "s390x")

    assert not slices.ask_for_short_slices()
