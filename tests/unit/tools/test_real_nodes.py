# SPDX-License-Identifier: Apache-2.0
"""What `make e2e` asks of this machine before it runs."""

import pytest
from tests.e2e import local
from tools import vllm_env


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made, on a host that cannot run nodes."""
    found: list[str] = []
    monkeypatch.setattr(local, "cannot", lambda: "not root")
    monkeypatch.setattr(vllm_env, "environment", lambda: found.append("environment"))
    return found


def test_a_host_that_cannot_run_nodes_says_why_and_makes_nothing(
    made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("E2E_PROVIDER", raising=False)

    assert local.main() == local.CANNOT
    assert capsys.readouterr().out == "not root\n"
    assert made == []


def test_somebody_elses_cluster_asks_nothing_of_this_host_but_the_engines_environment(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2E_PROVIDER", "existing")

    assert local.main() == 0
    assert made == ["environment"]
