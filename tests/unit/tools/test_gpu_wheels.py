# SPDX-License-Identifier: Apache-2.0
"""The wheels for a bare GPU machine are those of the lock file."""

import pytest
from tools.gpu_wheels import PACKAGES, ROOT, pinned


def test_versions_come_from_the_lock() -> None:
    lock = "blake3==1.0.11\n    # via kvpool\npyjwt[crypto]==2.15.1\nzmq==1\n"

    assert pinned(lock, ["pyjwt", "blake3"]) == ["pyjwt==2.15.1", "blake3==1.0.11"]
    with pytest.raises(KeyError):
        pinned(lock, ["xxhash"])


def test_the_lock_has_all_that_travels() -> None:
    assert len(pinned((ROOT / "requirements-dev.lock").read_text(), PACKAGES)) == len(PACKAGES)
