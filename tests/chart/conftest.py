# SPDX-License-Identifier: Apache-2.0
"""The real helm."""

import pytest
from tests.chart.rendering import Helm, real_helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    return real_helm()
