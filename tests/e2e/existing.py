# SPDX-License-Identifier: Apache-2.0
"""A cluster that somebody else runs: named by KUBECONFIG, with the images where its nodes find them."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.kube import write_state
from tools.cluster_assets import ASSETS, assets

__all__ = ["ExistingCluster"]


class ExistingCluster:
    """What the stories need of a cluster, by kubectl alone."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Find the tools.

        Raises:
            KeyError: no KUBECONFIG.
        """
        self.kubeconfig = Path(environ["KUBECONFIG"])
        self.programs = assets((ASSETS["kubectl"], ASSETS["helm"]))

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> str:
        """Run kubectl and return what it prints.

        Raises:
            AssertionError: it failed.
        """
        command = [str(self.programs["kubectl"]), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout

    def collect(self, target: Path) -> None:
        """Write down what can be asked."""
        write_state(self.kubectl, target)
