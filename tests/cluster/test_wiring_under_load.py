# SPDX-License-Identifier: Apache-2.0
"""Replicas and certificates of the admission server are replaced while pods are created; nobody notices."""

import base64
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import NAMESPACES, Caller
from tests.cluster.control_plane import ControlPlane
from tests.cluster.creating import Creator, Tally
from tests.cluster.pki import Authority
from tests.cluster.processes import wait_for
from tests.cluster.webhooks import NAMESPACE, Deployment, Replica, deployment

from kvpool_operator.admission.authority import Certificates, issue
from kvpool_operator.cluster import PODS, SECRETS
from kvpool_operator.errors import Absent

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RATE = 20.0


@pytest.fixture
def place(api: Caller, control_plane: ControlPlane) -> Iterator[None]:
    """The namespace of the admission server, without a Secret from another test."""
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    remove_secret(api)
    yield
    remove_secret(api)


def remove_secret(api: Caller) -> None:
    try:
        found = api(api.cluster.get(SECRETS, NAMESPACE, "kvpool-webhook"))
    except Absent:
        return
    api(api.cluster.delete(SECRETS, NAMESPACE, "kvpool-webhook", found["metadata"]["uid"]))


def all_were_wired(tally: Tally, least: int) -> None:
    assert tally.refused == []
    assert tally.unwired == []
    assert tally.wired >= least


def test_a_rolling_update_refuses_none_and_leaves_none_unwired(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str
) -> None:
    with deployment(control_plane, api, control_plane.admin) as hooks:
        former = [hooks.add(), hooks.add()]
        with Creator(control_plane.admin, namespace, RATE) as creator:
            for replica in former:
                hooks.add()
                hooks.retire(replica)
            wait_for("some more pods", lambda: creator.tally.wired > 100)

        all_were_wired(creator.tally, 100)
        assert hooks.balancer.connections > 1, "the API server had to connect anew"


def test_a_killed_replica_costs_at_most_what_was_on_its_way(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str
) -> None:
    """Nobody can promise more for a death without a word; what the main hook let through is unwired, not lost."""
    with deployment(control_plane, api, control_plane.admin) as hooks:
        victim, _ = hooks.add(), hooks.add()
        with Creator(control_plane.admin, namespace, RATE) as creator:
            wait_for("some pods", lambda: creator.tally.wired > 20)
            victim.stop(grace_s=0.0)
            before = creator.tally.wired
            wait_for("pods go on", lambda: creator.tally.wired > before + 100)
        hooks.balancer.replicas.remove(victim)

        assert len(creator.tally.refused) + len(creator.tally.unwired) <= 10


def bundles(hooks: Deployment) -> set[bytes]:
    return {base64.b64decode(h["clientConfig"].get("caBundle") or "") for h in hooks.hooks().values()}


@pytest.mark.timeout(240)
def test_certificates_are_replaced_again_and_again_under_load(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str
) -> None:
    short = {"KVPOOL_WEBHOOK_CERTIFICATE_LIFE_S": "45", "KVPOOL_WEBHOOK_SETTLE_S": "2"}
    with deployment(control_plane, api, control_plane.admin, **short) as hooks:
        for _ in range(2):
            hooks.add()
        seen: set[bytes] = set()

        def rotated() -> bool:
            seen.update(bundles(hooks))
            return len(seen) >= 5  # none, alone, with another (as next, then as old), alone, with another again

        with Creator(control_plane.admin, namespace, RATE) as creator:
            wait_for("a rotation and the start of another", rotated, 150.0, interval_s=0.5)

        all_were_wired(creator.tally, 200)
        assert any(bundle.count(b"BEGIN CERTIFICATE") == 2 for bundle in seen), "both authorities at a time"


@pytest.mark.timeout(120)
def test_a_certificate_that_somebody_else_renews_is_taken_under_load(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str, tmp_path: Path
) -> None:
    """As with cert-manager: its authority is published by somebody else, and its pair is mounted."""
    authority = Authority(tmp_path / "pki")
    mount(tmp_path, authority, "first")
    folder = {"KVPOOL_WEBHOOK_CERTIFICATE_FOLDER": str(tmp_path / "mounted")}
    with deployment(control_plane, api, control_plane.admin, **folder) as hooks:
        bundle = base64.b64encode(authority.file.read_bytes()).decode()
        api(api.cluster.apply_bundle(hooks.configuration, hooks.hooks(), bundle))
        replicas = [hooks.add(), hooks.add()]

        def served() -> list[int]:
            return [r.log().count("certificate.served") for r in replicas]

        first = served()  # with what replicas of former tests have told: names of replicas come again
        with Creator(control_plane.admin, namespace, RATE) as creator:
            for renewal in (1, 2):
                mount(tmp_path, authority, f"renewed-{renewal}")
                wait_for("the new pair", lambda renewal=renewal: served() == [n + renewal for n in first])
            before = creator.tally.wired
            wait_for("some more pods", lambda: creator.tally.wired > before + 50)

        all_were_wired(creator.tally, 50)
    with pytest.raises(Absent):
        api(api.cluster.get(SECRETS, NAMESPACE, "kvpool-webhook"))


def mount(folder: Path, authority: Authority, version: str) -> None:
    """Put a fresh pair where the admission server reads it, as the kubelet does: both files at once."""
    made = folder / version
    made.mkdir()
    for source, name in zip(authority.serving(version, ["127.0.0.1"]), ("tls.crt", "tls.key"), strict=True):
        source.rename(made / name)
    (folder / "fresh").symlink_to(made)
    (folder / "fresh").rename(folder / "mounted")


def put_secret(api: Caller, certificates: Certificates) -> None:
    data = {name: base64.b64encode(value).decode() for name, value in certificates.data().items()}
    metadata = {"name": "kvpool-webhook", "namespace": NAMESPACE}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
    assert api(api.cluster.create(SECRETS, NAMESPACE, secret))


NOW = dt.datetime.now(dt.UTC)
FOUND: dict[str, Any] = {
    "expired": Certificates(issue(["127.0.0.1"], NOW - dt.timedelta(days=9), 3600.0)),
    "of-another-name": Certificates(issue(["former.svc"], NOW, 3600.0)),
    "damaged": Certificates(),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_found_at_the_start_is_put_right(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str, what: str
) -> None:
    put_secret(api, FOUND[what])

    with deployment(control_plane, api, control_plane.admin) as hooks:
        hooks.add()
        with Creator(control_plane.admin, namespace, RATE) as creator:
            wait_for("pods", lambda: creator.tally.wired > 10)

        all_were_wired(creator.tally, 10)


def test_without_any_replica_only_the_strict_hook_refuses(
    api: Caller, control_plane: ControlPlane, place: None, namespace: str
) -> None:
    with deployment(control_plane, api, control_plane.admin) as hooks:
        hooks.retire(hooks.add())
        with Creator(control_plane.admin, namespace, 4.0) as creator:
            tally = creator.tally
            wait_for("answers", lambda: len(tally.refused) > 2 and len(tally.unwired) > 2)

        assert tally.wired == 0
        assert not any("required" in name for name in tally.unwired)
        plain = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}}
        plain["spec"] = {"containers": [{"name": "c", "image": "i"}]}
        assert api(api.cluster.create(PODS, namespace, plain)), "others are never asked about"


def test_a_missing_right_is_told_and_keeps_a_replica_unready(
    api: Caller, control_plane: ControlPlane, place: None
) -> None:
    with deployment(control_plane, api, control_plane.kubeconfig("nobody")) as hooks:
        replica = Replica(control_plane, "webhook-nobody", hooks.kubeconfig, hooks.more)
        replica.start(wait=False)
        try:
            wait_for(
                "the reasons", lambda: all(f"{part}.unseen" in replica.log() for part in ("pools", "certificates"))
            )

            status, text = replica.get("/readyz")
        finally:
            replica.stop()

    assert status == 503
    assert "pools not listed yet" in text
    assert "does not verify" in text
