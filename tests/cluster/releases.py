# SPDX-License-Identifier: Apache-2.0
"""Releases of the chart on a control plane, and kubectl as whoever a test wants to be."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.chart import rights as code
from tests.chart.rendering import Helm, Object
from tests.cluster.control_plane import ControlPlane
from tools.chart import CHART

__all__ = ["Kubectl", "Release"]


class Kubectl:
    """The real kubectl as one user."""

    def __init__(self, control_plane: ControlPlane, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self._command = [control_plane.programs["kubectl"], f"--kubeconfig={kubeconfig}"]

    def __call__(self, *arguments: str | Path, stdin: str = "") -> str:
        done = subprocess.run(
            [*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rights(self, namespace: str) -> set[code.Right]:
        """What this user may do in *namespace*, in the API server's own words."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer = json.loads(self("create", "--raw", path, "-f", "-", stdin=json.dumps(review)))
        assert not answer["status"].get("evaluationError")
        return {
            (group, resource, verb)
            for rule in answer["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }


@dataclass
class Release:
    """One release of the chart in a namespace of its own."""

    helm: Helm
    control_plane: ControlPlane
    namespace: str
    name: str = "kvpool"

    def install(self, values: Object, chart: Path = CHART) -> None:
        """Install *chart*, or upgrade what is there to it."""
        options = ("--kubeconfig", self.control_plane.admin, "--namespace", self.namespace, "--values", "-")
        self.helm.run("upgrade", "--install", self.name, chart, *options, stdin=json.dumps(values))

    def rollback(self) -> None:
        """Go back to what was there before the last upgrade."""
        self.helm.run("rollback", self.name, "--kubeconfig", self.control_plane.admin, "--namespace", self.namespace)

    def uninstall(self) -> None:
        options = ("--kubeconfig", self.control_plane.admin, "--namespace", self.namespace)
        self.helm.run("uninstall", self.name, *options)

    def account(self, name: str = "") -> Kubectl:
        """The operator's own account as its pods would use it, or another one of the namespace."""
        admin, name = Kubectl(self.control_plane, self.control_plane.admin), name or f"{self.name}-operator"
        token = admin("create", "token", name, "--namespace", self.namespace).strip()
        return Kubectl(self.control_plane, self.control_plane.token_kubeconfig(f"{self.namespace}-{name}", token))

    def granted(self, namespace: str) -> set[code.Right]:
        """What the operator's account may do in *namespace* and an account without any role may not."""
        return self.account().rights(namespace) - self.account("default").rights(namespace)
