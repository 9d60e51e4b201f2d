# SPDX-License-Identifier: Apache-2.0
"""The portable stories on a cluster that belongs to somebody else: they run, and touch nothing but their namespaces."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.conftest import Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_nodes
from tests.portable.providers import ExistingProvider, KindProvider, provider

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
VISITOR = "a-visitor"
READS_ONLY = ("selfsubjectaccessreviews", "selfsubjectrulesreviews")


def stories(**environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "tests/portable", "-q", "-rs", "-p", "no:cacheprovider"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=580, cwd=ROOT, env={**os.environ, **environ}
    )


def test_on_a_foreign_cluster_nothing_outside_of_their_own_namespaces_is_touched(
    api: Caller, control_plane: ControlPlane
) -> None:
    with contextlib.ExitStack() as nodes:
        for name in ("visited-a", "visited-b"):
            nodes.enter_context(fake_nodes(api, name, **{"kubernetes.io/hostname": name}))
        kubeconfig = control_plane.kubeconfig(VISITOR, ("system:masters",))
        start = control_plane.audit_log.stat().st_size

        done = stories(E2E_PROVIDER="existing", KUBECONFIG=str(kubeconfig), E2E_CAPABILITIES="controllers,pods")

    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"SKIPPED \[\d+\] .*: (.*)", done.stdout)
    assert sorted(skipped) == ["the cluster lacks crd (existing)", "the cluster lacks kubelet (existing)"]
    writes = [
        e
        for e in control_plane.audit(start)
        if e["user"]["username"] == VISITOR and e["verb"] in ("create", "update", "patch", "delete", "deletecollection")
    ]
    places = {e["objectRef"].get("namespace") or e["objectRef"].get("name") for e in writes if "objectRef" in e}
    made = {p for p in places if p and p.startswith("kvpool-e2e-")}
    assert len(made) == 1
    outside = [
        f"{e['verb']} {e['requestURI']}"
        for e in writes
        if (e.get("objectRef", {}).get("namespace") or e.get("objectRef", {}).get("name")) not in made
        and e.get("objectRef", {}).get("resource") not in READS_ONLY
        and not (e["verb"] == "create" and e["requestURI"].startswith("/api/v1/namespaces?"))
    ]
    assert outside == []


def test_a_cluster_that_was_promised_and_is_not_there_fails_the_run(tmp_path: Path) -> None:
    absent = {"E2E_PROVIDER": "kind", "KIND_CLUSTER": ""}

    promised = stories(**absent, KVPOOL_EXPECT_CLUSTER="1")
    assert promised.returncode == 1
    assert "unexpected skips" in promised.stdout
    assert "KIND_CLUSTER does not name" in promised.stdout
    assert stories(**absent, KVPOOL_EXPECT_CLUSTER="").returncode == 0


def test_providers_say_what_they_need() -> None:
    assert "KIND_CLUSTER" in KindProvider({}).unavailable()
    assert "KUBECONFIG" in ExistingProvider({}).unavailable()
    assert "crd" not in ExistingProvider({"E2E_CAPABILITIES": "controllers crd"}).capabilities
    with pytest.raises(ValueError, match="gpu"):
        ExistingProvider({"E2E_CAPABILITIES": "gpu"})
    with pytest.raises(ValueError, match="minikube"):
        provider({"E2E_PROVIDER": "minikube"})
