# SPDX-License-Identifier: Apache-2.0
"""A client comes back within seconds of its server, however slow the name service is."""

import json
import shutil
import subprocess
import sys

import pytest

SPACES = ("unshare", "--mount", "--net")
LIMIT_S = 10.0


def refused() -> bool:
    probe = [*SPACES, "ip", "link", "set", "lo", "up"]
    tools = all(map(shutil.which, ("unshare", "ip", "mount")))
    return not tools or bool(subprocess.run(probe, capture_output=True, check=False).returncode)


pytestmark = pytest.mark.skipif(refused(), reason="no namespaces, or no iproute2")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delay_s", [0, 2.5], ids=["fast", "slower-than-an-attempt"])
def test_a_client_comes_back_within_seconds_of_its_server(delay_s, tmp_path):
    command = [*SPACES, sys.executable, "-m", "tests.fakes.slow_names", str(tmp_path), str(delay_s)]

    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)

    assert not ended.returncode, ended.stderr
    found = json.loads(ended.stdout)
    assert all(0 <= seconds < LIMIT_S for seconds in found.values()), found
