# SPDX-License-Identifier: Apache-2.0
"""Who a wired pod is: a real API server's tokens, the configuration that the operator renders, a real cache server.

The pods' containers do not run; what admission put into them is read as an engine would read it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.conftest import NAMESPACES, Caller, make_namespace, remove_namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.test_operator import make_pool
from tests.cluster.test_wiring import annotations, body, create, environment
from tests.cluster.webhooks import NAMESPACE, deployment
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.server_process import ServerProcess
from tests.fakes.tenants import BLOCKS, check_apart

from kvpool.client.link import Link
from kvpool.config import ClientConfig, decode_client
from kvpool.model.identity import ClientKind
from kvpool.model.reasons import UncachedReason
from kvpool.server.keys import make_key
from kvpool_operator.cluster import POOLS
from kvpool_operator.desired import config_map
from kvpool_operator.settings import Settings
from kvpool_operator.spec import parse_pool
from kvpool_operator.surroundings import Surroundings

pytestmark = pytest.mark.cluster

Pod = dict[str, Any]

SIZE_BYTES = 64 << 20
SHARE_PERCENT = 25


@dataclass
class Place:
    """A pool's namespace, one that it allows, one that it does not; the pool's server, and its public key."""

    api: Caller
    folder: Path
    own: str
    allowed: str
    stranger: str
    server: ServerProcess
    public: str

    def pod(self, namespace: str, name: str = "engine") -> Pod:
        """A pod of *namespace* as admission leaves it."""
        far = {} if namespace == self.own else {"kvpool.dev/pool-namespace": self.own}
        return create(self.api, namespace, body(name, annotations=far))

    def client(self, pod: Pod, token: str | None = None) -> ClientConfig:
        """What the connector in *pod* reads, with the kubelet's files in a folder of ours."""
        metadata = pod["metadata"]
        folder = self.folder / metadata["uid"]
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(token or self.token(pod))
        (folder / "server-key").write_text(self.public)
        literal = {k: v for k, v in environment(pod).items() if v is not None and k.startswith("KVPOOL_")}
        found = decode_client(b"", literal)
        assert found.token_file == "/var/run/secrets/kvpool.dev/token"
        files = {"token_file": str(folder / "token")}
        if found.server_key_file:
            files["server_key_file"] = str(folder / "server-key")
        return msgspec.structs.replace(found, server=self.server.endpoints[0], connect_s=1.0, **files)

    def token(self, pod: Pod, audience: str = "") -> str:
        """The token that the kubelet would fetch for *pod*: as its volume says, bound to that very pod."""
        metadata = pod["metadata"]
        sources = [s for v in pod["spec"]["volumes"] for s in v.get("projected", {}).get("sources", [])]
        wanted = [s["serviceAccountToken"] for s in sources if "serviceAccountToken" in s]
        (ours,) = (w for w in wanted if w.get("audience", "").startswith("kvpool.dev/"))
        reference = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
        spec = {"audiences": [audience or ours["audience"]], "expirationSeconds": 600, "boundObjectRef": reference}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/default/token"
        answer = self.api(self.api.cluster._call("POST", path, {}, body=request))
        return str(answer["status"]["token"])

    def engine(self, pod: Pod, model: str = "m") -> FakeEngine:
        """An engine in *pod*."""
        config = msgspec.structs.asdict(self.client(pod))
        config.pop("modes")
        return FakeEngine(config.pop("server"), blocks=BLOCKS, model=model, **config)

    def verdict(self, config: ClientConfig) -> UncachedReason | None:
        link = Link(config, ClientKind.PROBE)
        link.start()
        try:
            state = until(lambda: link.state if link.state.reason is not UncachedReason.STARTING else None)
        finally:
            link.close(0.2)
        return state.reason


@pytest.fixture(scope="module")
def place(api: Caller, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    api(api.cluster.create(NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    own, allowed, stranger = (make_namespace(api, "baseline") for _ in range(3))
    folder = tmp_path_factory.mktemp("identity")
    public = make_key(str(folder / "key"))
    shares = [{"tenant": namespace, "l1Percent": SHARE_PERCENT} for namespace in (own, allowed)]
    make_pool(api, own, clients={"allowedNamespaces": [allowed]}, tenants={"quotas": shares})
    api(api.cluster.apply_status(own, "a", {"serverKey": public}))
    with (
        deployment(control_plane, api, control_plane.admin) as hooks,
        ServerProcess(folder, size_bytes=SIZE_BYTES, **server_sections(api, own, folder, public)) as server,
    ):
        hooks.add()
        until(lambda: server.endpoints, 30)
        yield Place(api, folder, own, allowed, stranger, server, public)
    for name in (own, allowed, stranger):
        api(remove_namespace(api.cluster, name))


def server_sections(api: Caller, namespace: str, folder: Path, public: str) -> dict[str, Any]:
    """What the operator renders for the pool's servers, with its files and its address where this machine has them."""
    pool = parse_pool(api(api.cluster.get(POOLS, namespace, "a")))
    facts = api(Surroundings(api.cluster, Settings(), lambda: 0.0).facts(public))
    (folder / "issuer.jwks").write_text(facts.issuer_keys)
    rendered = json.loads(msgspec.json.encode(config_map.server_config(pool, facts)))
    for issuer in rendered["auth"]["issuers"]:
        issuer["keys_file"] = str(folder / "issuer.jwks")
    listen = {"socket_path": "", "tcp_host": "127.0.0.1", "tcp_port": 0, "curve_key_file": str(folder / "key")}
    return {"listen": listen, "auth": rendered["auth"], "l1": {"quotas": rendered["l1"]["quotas"]}}


def test_pods_of_the_pools_and_of_an_allowed_namespace_are_admitted(place: Place) -> None:
    for namespace in (place.own, place.allowed):
        pod = place.pod(namespace)

        assert annotations(pod)["kvpool.dev/wiring"] == "Complete"
        assert place.verdict(place.client(pod)) is None


def test_a_pod_of_another_namespace_is_refused_by_the_server_too(place: Place) -> None:
    """It is not wired; and whoever copies what a wired pod has, its token's audience included, is not let in."""
    refused = place.pod(place.stranger)
    assert annotations(refused)["kvpool.dev/wiring"] == "NamespaceNotAllowed"
    wired = place.pod(place.allowed, "model")
    copied = {**refused, "spec": wired["spec"]}

    own_token = place.token(copied)

    assert place.verdict(place.client(wired, own_token)) is UncachedReason.IDENTITY


def test_a_token_for_somebody_else_is_refused(place: Place) -> None:
    pod = place.pod(place.own, "other-audience")

    for audience in ("kvpool.dev/elsewhere/a", "https://kubernetes.default.svc"):
        assert place.verdict(place.client(pod, place.token(pod, audience))) is UncachedReason.IDENTITY


def test_namespaces_are_tenants_that_share_nothing(place: Place) -> None:
    keys = digests(3)
    first, second, third = place.pod(place.own, "a1"), place.pod(place.own, "a2"), place.pod(place.allowed, "b1")

    with place.engine(first) as one, place.engine(second) as two, place.engine(third) as stranger:
        for each in (one, two, stranger):
            each.healthy()
        one.blocks.fill(1)
        one.store(keys)

        assert two.lookup(keys).chunks == 3, "a pod of the same namespace"
        assert stranger.lookup(keys).chunks == 0
        stranger.blocks.fill(2)
        stranger.store(keys)
        assert two.load(two.lookup(keys, "again"), 100, request_id="again") == frozenset()
        assert (two.bytes_of(100, 3) == one.bytes_of(0, 3)).all(), "what the other tenant stored is its own"


@pytest.mark.timeout(180)
def test_a_namespace_keeps_its_share_whatever_pods_of_another_one_do(place: Place) -> None:
    """Two tenants' pods with the API server's own tokens, and the quotas of the pool's spec."""
    kept, loud = place.pod(place.own, "kept"), place.pod(place.allowed, "loud")
    with place.engine(kept, "apart") as mine, place.engine(loud, "apart") as theirs:
        mine.healthy()
        theirs.healthy()

        check_apart(mine, theirs, SIZE_BYTES * SHARE_PERCENT // 100, "apart")
