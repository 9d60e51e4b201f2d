# SPDX-License-Identifier: Apache-2.0
"""The portable stories on a cluster that belongs to somebody else: they run, and touch nothing but their namespaces."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chart.rendering import real_helm
from tests.cluster.conftest import NAMESPACES, Caller, connect
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import fake_node, fake_nodes
from tests.portable.providers import SYSTEM, ExistingProvider, KindProvider, provider
from tools.node_images import reference

from kvpool import __version__
from kvpool_operator.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
VISITOR = "a-visitor"
IMAGES = tuple(reference(name) for name in ("operator", "server"))
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


class Programs:
    """Stand-ins for kind and docker, which write down how they were called, in front of everything else on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.kubeconfig = folder / "given-kubeconfig"
        self.images = folder / "images"
        self.images.write_text("")
        kind = f"""case "$1 $2" in
            "get clusters") echo other; echo dev ;;
            "get kubeconfig") cat {self.kubeconfig} ;;
            "load docker-image") grep -qx "$3" {self.images} ;;
            *) exit 2 ;;
        esac"""
        docker = f"""test "$1 $2" = "image inspect" && grep -qx "$3" {self.images}"""
        for name, does in (("kind", kind), ("docker", docker)):
            file = folder / name
            file.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{does}\n')
            file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def test_kind_is_asked_for_its_cluster_and_docker_for_the_images_before_anything_is_written(
    programs: Programs,
) -> None:
    real_helm()
    assert "kind knows no cluster absent" in KindProvider({"KIND_CLUSTER": "absent"}).unavailable()
    reason = KindProvider({"KIND_CLUSTER": "dev"}).unavailable()
    assert reason.startswith(f"docker lacks localhost/kvpool-operator:{__version__}, localhost/kvpool-server:")
    assert "tools.images --registry localhost" in reason

    programs.images.write_text("\n".join(IMAGES))

    assert KindProvider({"KIND_CLUSTER": "dev"}).unavailable() == ""
    assert not [c for c in programs.calls() if "load" in c]


def test_kind_gets_the_images_that_the_charts_pods_ask_for_and_the_chart_and_is_left_as_it_was(
    control_plane: ControlPlane, programs: Programs
) -> None:
    """A control plane with simulated nodes takes the place of kind's cluster."""
    programs.images.write_text("\n".join(IMAGES))
    with ControlPlane() as apart, asyncio.Runner() as runner:
        client = runner.run(connect(apart.admin))
        api = Caller(runner, Cluster(client))
        programs.kubeconfig.write_text(apart.admin.read_text())
        for name in ("kind-a", "kind-b", "kind-c"):
            fake_node(api, name, **{"kubernetes.io/hostname": name})
        with KindProvider({"KIND_CLUSTER": "dev"}).place() as place:
            deployments = place.kube.all("deployments", SYSTEM)
            wanted = {c["image"] for d in deployments for c in d["spec"]["template"]["spec"]["containers"]}
            text = json.dumps(deployments)
            place.kube.apply(place.pool("one"))
            stored = place.kube.get("kvp", "one", place.namespace)

        loaded = [c.split()[3] for c in programs.calls() if c.startswith("kind load")]
        assert all(c.endswith("--name dev") for c in programs.calls() if c.startswith("kind load"))
        assert tuple(loaded) == IMAGES
        assert wanted == {IMAGES[0]}
        assert IMAGES[1] in text, "the operator makes servers of it"
        assert (place.nodes, stored["spec"]["l1"]["size"]) == (2, "256Mi")

        async def gone() -> bool:
            found = {n["metadata"]["name"] for n in await api.cluster.list(NAMESPACES)}
            return not found & {SYSTEM, place.namespace}

        api.wait("both namespaces' end", gone, 120.0)
        runner.run(client.close())


def test_a_program_that_fails_is_quoted(programs: Programs) -> None:
    real_helm()
    programs.images.write_text("\n".join(IMAGES))
    provider = KindProvider({"KIND_CLUSTER": "dev"})

    with pytest.raises(AssertionError, match=r"kind get kubeconfig --name dev: .*given-kubeconfig"), provider.place():
        pass


def test_providers_say_what_they_need() -> None:
    assert "KIND_CLUSTER" in KindProvider({}).unavailable()
    assert "KUBECONFIG" in ExistingProvider({}).unavailable()
    assert "crd" not in ExistingProvider({"E2E_CAPABILITIES": "controllers crd"}).capabilities
    with pytest.raises(ValueError, match="gpu"):
        ExistingProvider({"E2E_CAPABILITIES": "gpu"})
    with pytest.raises(ValueError, match="minikube"):
        provider({"E2E_PROVIDER": "minikube"})
