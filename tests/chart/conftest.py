# SPDX-License-Identifier: Apache-2.0
"""The real helm."""

import os

import pytest
from tests.chart.rendering import Helm
from tools.cluster_assets import ASSETS, find


@pytest.fixture(scope="session")
def helm() -> Helm:
    found = find(ASSETS["helm"])
    if found is None:
        reason = "helm is missing; run `python tools/cluster_assets.py --only control-plane`"
        if os.environ.get("KVPOOL_EXPECT_CLUSTER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Helm(found)
