# SPDX-License-Identifier: Apache-2.0
"""The admission server of a release of the chart, as the account that the chart makes for it, and nobody more."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.chart import rights as code
from tests.chart.rendering import real_helm
from tests.cluster.conftest import Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.releases import Release
from tests.cluster.test_chart import CLASSES, forget
from tests.cluster.test_operator import make_pool
from tests.cluster.webhooks import Replica

from kvpool_operator.cluster import HOOKS, SECRETS

pytestmark = pytest.mark.cluster

VALUES: dict[str, Any] = {"crds": {"install": False}}


@pytest.fixture
def release(api: Caller, control_plane: ControlPlane) -> Iterator[Release]:
    made = Release(real_helm(), control_plane, make_namespace(api, "restricted"))
    made.install(VALUES)
    yield made
    made.uninstall()
    forget(api, CLASSES, f"{made.namespace}.{made.name}")
    api(remove_namespace(api.cluster, made.namespace))


def granted(release: Release, namespace: str) -> set[code.Right]:
    account, nobody = release.account("kvpool-webhook"), release.account("default")
    return account.rights(namespace) - nobody.rights(namespace)


def test_the_account_has_the_rights_that_the_code_uses_and_no_other(release: Release, namespace: str) -> None:
    pools, hooks, own = code.webhook_rights()

    assert granted(release, namespace) == pools | hooks
    assert granted(release, release.namespace) == pools | hooks | own


def test_its_secret_and_its_hooks_are_the_only_ones_it_reads(api: Caller, release: Release) -> None:
    kubectl = release.account("kvpool-webhook")

    def may(*words: str) -> bool:
        try:
            return kubectl("auth", "can-i", *words, "--namespace", release.namespace).strip() == "yes"
        except AssertionError:
            return False

    assert may("get", "secrets/kvpool-webhook")
    assert not may("get", "secrets/other")
    assert not may("list", "secrets")
    assert may("patch", f"mutatingwebhookconfigurations/{release.namespace}.kvpool-webhook")
    assert not may("patch", "mutatingwebhookconfigurations/other")


@pytest.mark.parametrize("named", [False, True], ids=["cluster", "namespaced"])
def test_a_replica_gets_ready_with_these_rights_alone_and_an_upgrade_leaves_its_bundle(
    api: Caller, control_plane: ControlPlane, release: Release, namespace: str, named: bool
) -> None:
    values = VALUES | ({"watchNamespaces": [namespace]} if named else {})
    release.install(values)
    make_pool(api, namespace)
    configuration = f"{release.namespace}.kvpool-webhook"
    more = {
        "KVPOOL_WEBHOOK_NAMESPACE": release.namespace,
        "KVPOOL_WEBHOOK_CONFIGURATION": configuration,
        "KVPOOL_WEBHOOK_WATCH_NAMESPACES": namespace if named else "",
    }
    replica = Replica(control_plane, "webhook-rights", release.account("kvpool-webhook").kubeconfig, more)
    replica.start()
    try:
        before = bundles(api, configuration)
        release.install(values | {"webhook": {"timeoutSeconds": 3}})

        assert bundles(api, configuration) == before
        assert replica.ready()
        assert "unseen" not in replica.log()
    finally:
        replica.stop()
    secret = api(api.cluster.get(SECRETS, release.namespace, "kvpool-webhook"))
    assert secret["type"] == "kubernetes.io/tls"


def bundles(api: Caller, configuration: str) -> list[str]:
    found = [h["clientConfig"]["caBundle"] for h in api(api.cluster.get(HOOKS, "", configuration))["webhooks"]]
    assert all(found)
    return found
