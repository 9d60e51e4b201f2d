# SPDX-License-Identifier: Apache-2.0
"""Identity from tokens over a real socket: tenants are kept apart, and an identity must be renewed."""

import os

import pytest
from tests.fakes.issuer import AUDIENCE, NOW, TestIssuer
from tests.fakes.running_server import running_server

from kvpool.config import AuthConfig, AuthKind, Issuer
from kvpool.model.errors import IdentityRefused
from kvpool.wire import messages as m


class Wall:
    """A wall clock that a test moves."""

    def __init__(self):
        self.now_s = NOW

    def __call__(self):
        return self.now_s


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def issuer(tmp_path):
    return TestIssuer(tmp_path)


@pytest.fixture
def server(tmp_path, issuer, wall):
    auth = AuthConfig(
        kind=AuthKind.TOKEN,
        issuers=(Issuer(issuer=issuer.issuer, keys_file=issuer.keys_file),),
        audience=AUDIENCE,
        tenants={"team-c": "team-a"},
        namespaces=("team-a", "team-b", "team-c"),
        leeway_s=0,
    )
    with running_server(tmp_path, auth=auth, wall=wall) as running:
        yield running


def enter(server, issuer, **claims):
    client = server.connect()
    welcome = client.welcome(credential=issuer.token(**claims))
    client.register(4096)
    return client, welcome


def store_one(server, client, welcome, digest):
    store_id = os.urandom(16)
    with server.connect() as bulk:
        bulk.ask(m.AttachBulk(ticket=welcome.ticket))
        prepared, _ = client.ask(m.PrepareStore(request_id="r", store_id=store_id), digest)
        if prepared.write:
            bulk.ask(m.WriteChunk(store_id=store_id, chunk=0, offset=0), bytes(4096))
        client.ask(m.CommitStore(store_id=store_id), b"\1", bytes(16))


def hits(client, digest, request_id="look"):
    return client.ask(m.Lookup(request_id=request_id, lookup_id=os.urandom(16)), digest)[0].chunks


@pytest.mark.behaviour("D041", "D050")
def test_tenants_share_nothing_but_what_the_pool_maps_together(server, issuer):
    digest = os.urandom(32)
    (a, welcome), (b, _), (c, _) = (enter(server, issuer, namespace=n) for n in ("team-a", "team-b", "team-c"))
    store_one(server, a, welcome, digest)

    assert (hits(a, digest), hits(b, digest), hits(c, digest)) == (1, 0, 1)
    b.ask(m.Clear(forced=True))
    assert hits(a, digest, "after") == 1

    for client in (a, b, c):
        client.close()


@pytest.mark.behaviour("D050")
def test_a_tenant_cannot_use_anothers_ids(server, issuer):
    digest, lookup_id = os.urandom(32), os.urandom(16)
    (a, welcome), (b, _) = enter(server, issuer, namespace="team-a"), enter(server, issuer, namespace="team-b")
    store_one(server, a, welcome, digest)
    a.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digest)

    assert b.refusal(m.LookupStatus(lookup_id=lookup_id)).code == "unknown_lease"
    assert b.ask(m.FreeLookup(lookup_id=lookup_id))[0].chunks == 0
    assert b.refusal(m.PrepareRetrieve(lookup_id=lookup_id, end=1)).code == "unknown_lease"
    assert a.ask(m.LookupStatus(lookup_id=lookup_id))[0].chunks == 1
    assert isinstance(
        b.refusal(b.hello(client_id=a.client_id, credential=issuer.token(namespace="team-b"))), IdentityRefused
    )
    assert isinstance(a.ask(m.Ping())[0], m.Pong)

    a.close()
    b.close()


@pytest.mark.behaviour("D041")
def test_tenant_comes_from_the_token_whatever_the_client_says(server, issuer):
    client = server.connect()

    welcome = client.welcome(credential=issuer.token(namespace="team-b", pod="real"), label="team-a")

    assert welcome.tenant == "team-b"
    rows = server.ask(lambda: server.server.parts.engine.clients(server.server.parts.clock()))
    assert [(r.tenant, r.label) for r in rows] == [("team-b", "real")]
    client.close()


@pytest.mark.parametrize(
    "claims",
    [{"exp": NOW - 1}, {"aud": ["other"]}, {"iss": "https://other.test"}, {"namespace": "team-z"}],
    ids=["expired", "audience", "issuer", "namespace"],
)
def test_wrong_tokens_are_refused_at_hello(server, issuer, claims):
    with server.connect() as c:
        assert isinstance(c.refusal(c.hello(credential=issuer.token(**claims))), IdentityRefused)
        assert c.refusal(m.Ping()).code == "not_registered"


def test_an_expired_identity_must_be_renewed(tmp_path, issuer):
    auth = AuthConfig(
        kind=AuthKind.TOKEN,
        issuers=(Issuer(issuer=issuer.issuer, keys_file=issuer.keys_file),),
        audience=AUDIENCE,
        leeway_s=0,
    )
    with running_server(tmp_path, auth=auth, wall=lambda: NOW) as server, server.connect() as c:
        welcome = c.welcome(credential=issuer.token(exp=NOW + 0.25))
        assert 0 < welcome.identity_expires_s <= 0.25
        while not isinstance(reply := c.ask(m.Ping())[0], m.Failed):
            pass

        assert reply.code == "identity_expired"
        assert c.refusal(m.Stats()).code == "identity_expired"
        assert isinstance(c.ask(m.FreeLookup(lookup_id=bytes(16)))[0], m.Freed)
        assert isinstance(c.refusal(m.Renew(credential=issuer.token(namespace="team-b"))), IdentityRefused)
        assert c.refusal(m.Stats()).code == "identity_expired"
        renewed, _ = c.ask(m.Renew(credential=issuer.token(exp=NOW + 600)))
        assert renewed.identity_expires_s == pytest.approx(600)
        assert isinstance(c.ask(m.Stats())[0], m.Statistics)
