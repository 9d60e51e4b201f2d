# SPDX-License-Identifier: Apache-2.0
"""The second act of `make demo` from end to end: what a person sees, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chart.rendering import real_helm
from tests.cluster.control_plane import ControlPlane, base_folder

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


def demo(out: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.demo", "--only", "cluster", "--out", str(out)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=380, cwd=ROOT, env={**os.environ, **environ}
    )


def test_it_shows_a_pool_from_its_making_to_an_updated_status(control_plane: ControlPlane, tmp_path: Path) -> None:
    real_helm()
    before = set(base_folder().iterdir())

    done = demo(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "helm install kvpool charts/kvpool",
        "serviceaccount/kvpool-operator",
        "runs as system:serviceaccount:kvpool-system:kvpool-operator",
        "daemonset/kvpool-main",
        "networkpolicy/kvpool-main",
        "every server was replaced",
        "0.70",
        "4/4",
    ):
        assert words in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) < 80, "few enough lines to follow"
    assert set(base_folder().iterdir()) == before, "nothing is left"
    told = (tmp_path / "operator.log").read_text()
    assert "condition.changed" in told
    assert "Canary: trying the new spec on" in told, "a step may be too short for the status to show it"


def test_without_programs_and_go_it_says_so_in_one_line(tmp_path: Path) -> None:
    environ = {"KVPOOL_CACHE": str(tmp_path), "PATH": "", "KUBEBUILDER_ASSETS": ""}

    done = demo(tmp_path / "out", **environ)

    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("skipped"))
    assert "install Go" in line
