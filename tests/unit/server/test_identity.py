# SPDX-License-Identifier: Apache-2.0
"""Credentials: what is taken, what is refused, and that no error repeats them."""

import hashlib
import hmac
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.fakes.issuer import AUDIENCE, NOW, TestIssuer, ec_key, jwk, public_pem, raw_token, rsa_key

from kvpool.config import AuthConfig, AuthKind, Issuer
from kvpool.model.errors import IdentityRefused
from kvpool.server.identity import CredentialError, authenticator


@pytest.fixture
def issuer(tmp_path):
    return TestIssuer(tmp_path)


def token_config(issuer, **changes):
    values = {
        "kind": AuthKind.TOKEN,
        "issuers": (Issuer(issuer=issuer.issuer, keys_file=issuer.keys_file),),
        "audience": AUDIENCE,
    }
    return AuthConfig(**(values | changes))


def refusal(config, token, now=NOW):
    """Refuse *token*, without repeating any part of it."""
    with pytest.raises(IdentityRefused) as caught:
        authenticator(config).check(token, now)
    text = str(caught.value)
    assert not any(part and part in text for part in token.split("."))
    return text


@pytest.mark.behaviour("D041")
@pytest.mark.parametrize("kid", ["rsa-1", "ec-1"])
def test_good_token_gives_namespace_pod_and_time(issuer, kid):
    identity = authenticator(token_config(issuer, leeway_s=30)).check(issuer.token(kid), NOW)

    assert identity.tenant == "team-a"
    assert identity.label == "engine-0"
    assert identity.expires_in_s == pytest.approx(630)


@pytest.mark.behaviour("D041")
@pytest.mark.parametrize("audience", [AUDIENCE, ["somebody-else", AUDIENCE]])
def test_an_audience_may_be_a_name_or_one_of_several(issuer, audience):
    assert authenticator(token_config(issuer)).check(issuer.token(aud=audience), NOW).tenant == "team-a"


def test_tenants_maps_a_namespace(issuer):
    config = token_config(issuer, tenants={"team-a": "shared"})

    assert authenticator(config).check(issuer.token(), NOW).tenant == "shared"


def test_token_without_namespace_gets_the_default_tenant(issuer):
    token = issuer.token(**{"kubernetes.io": None})

    assert authenticator(token_config(issuer, tenant="outside")).check(token, NOW).tenant == "outside"


def test_token_without_namespace_is_refused_where_namespaces_are_listed(issuer):
    config = token_config(issuer, namespaces=("team-a",))

    assert "namespace" in refusal(config, issuer.token(**{"kubernetes.io": None}))


@pytest.mark.behaviour("D041")
def test_namespace_that_is_not_admitted_is_refused(issuer):
    config = token_config(issuer, namespaces=("team-b",))

    assert "admit" in refusal(config, issuer.token())


@pytest.mark.behaviour("D041")
def test_namespaces_and_tenants_can_change_and_nothing_else_of_how_an_identity_is_proven(issuer):
    made = authenticator(token_config(issuer, namespaces=("team-a",)))
    other = token_config(issuer, namespaces=("team-b",), tenants={"team-b": "shared"}, tenant="outside", audience="x")

    made.follow(other)

    assert made.check(issuer.token(namespace="team-b"), NOW).tenant == "shared"
    assert made.tenant_of("team-b") == "shared"
    for namespace in ("team-a", None):
        with pytest.raises(IdentityRefused):
            made.tenant_of(namespace)
    with pytest.raises(IdentityRefused, match="admit"):
        made.check(issuer.token(), NOW)
    made.follow(token_config(issuer, tenant="outside"))
    assert (made.tenant_of(None), made.tenant_of("team-a")) == ("outside", "team-a")


@pytest.mark.parametrize("kind", [AuthKind.NONE, AuthKind.SECRET])
def test_the_tenant_of_clients_without_a_namespace_can_change(tmp_path, kind):
    (tmp_path / "secret").write_text("s3cret")
    config = AuthConfig(kind=kind, secret_file=str(tmp_path / "secret"))
    made = authenticator(config)

    made.follow(AuthConfig(kind=kind, secret_file="elsewhere", tenant="guests"))

    assert made.check("s3cret", NOW).tenant == made.tenant_of(None) == "guests"


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ({"exp": NOW - 31}, "expired"),
        ({"exp": None}, "never expires"),
        ({"exp": float("inf")}, "exp"),
        ({"exp": 10**400}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"nbf": NOW + 31}, "holds only in"),
        ({"iat": NOW + 31}, "future"),
        ({"aud": ["somebody-else"]}, "audience"),
        ({"aud": "somebody-else"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": {"kvpool.test/pool": 1}}, "audience"),
        ({"iss": "https://other.test"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"kubernetes.io": {"pod": {"name": "x"}}}, "namespace"),
        ({"kubernetes.io": {"namespace": ["a"]}}, "namespace"),
        ({"kubernetes.io": {"namespace": "n" * 200}}, "namespace"),
        ({"kubernetes.io": "team-a"}, "object"),
    ],
)
def test_wrong_claims_are_refused_by_name(issuer, claims, word):
    # Signed by hand where the library would refuse to write such claims.
    header = {"alg": "RS256", "kid": "rsa-1", "typ": "JWT"}
    unsigned = raw_token(header, issuer.claims(**claims))
    message = unsigned.rpartition(".")[0]
    signature = sign_rs256(message)

    assert word in refusal(token_config(issuer, leeway_s=30), raw_token(header, issuer.claims(**claims), signature))


def sign_rs256(message, key=None):
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return (key or rsa_key("rsa-1")).sign(message.encode(), padding.PKCS1v15(), hashes.SHA256())


def test_clock_difference_within_the_leeway_is_allowed(issuer):
    check = authenticator(token_config(issuer, leeway_s=30)).check

    assert check(issuer.token(exp=NOW - 29), NOW).expires_in_s == pytest.approx(1)
    assert check(issuer.token(nbf=NOW + 29, iat=NOW + 29), NOW).tenant == "team-a"


@pytest.mark.behaviour("D041")
def test_algorithm_none_is_refused(issuer):
    token = raw_token({"alg": "none", "typ": "JWT", "kid": "rsa-1"}, issuer.claims())

    assert "algorithm" in refusal(token_config(issuer), token)


@pytest.mark.behaviour("D041")
def test_public_key_as_a_shared_secret_is_refused(issuer):
    header = {"alg": "HS256", "typ": "JWT", "kid": "rsa-1"}
    message = raw_token(header, issuer.claims()).rpartition(".")[0]
    signature = hmac.digest(public_pem(rsa_key("rsa-1")), message.encode(), hashlib.sha256)

    assert "algorithm" in refusal(token_config(issuer), raw_token(header, issuer.claims(), signature))


def test_symmetric_key_in_the_key_set_is_never_used(issuer):
    issuer.publish({"kty": "oct", "kid": "shared", "k": "c2VjcmV0", "alg": "HS256"})
    header = {"alg": "HS256", "typ": "JWT", "kid": "shared"}
    message = raw_token(header, issuer.claims()).rpartition(".")[0]
    signature = hmac.digest(b"secret", message.encode(), hashlib.sha256)

    assert "algorithm" in refusal(token_config(issuer), raw_token(header, issuer.claims(), signature))


def test_algorithm_must_fit_the_named_key(issuer):
    header = {"alg": "ES256", "typ": "JWT", "kid": "rsa-1"}

    assert "fit" in refusal(token_config(issuer), raw_token(header, issuer.claims(), b"x" * 64))


@pytest.mark.parametrize("kid", ["gone", None])
def test_unknown_key_is_refused(issuer, kid):
    assert "none of the 2 keys" in refusal(token_config(issuer), issuer.token(headers={"kid": kid}))


def test_signature_of_another_key_is_refused(issuer):
    header = {"alg": "RS256", "typ": "JWT", "kid": "rsa-1"}
    message = raw_token(header, issuer.claims()).rpartition(".")[0]
    signature = sign_rs256(message, rsa_key("stranger"))

    assert "signature" in refusal(token_config(issuer), raw_token(header, issuer.claims(), signature))


def test_changed_claims_are_refused(issuer):
    head, _, signature = issuer.token().split(".")
    claims = raw_token({}, issuer.claims(namespace="team-b")).split(".")[1]

    assert "signature" in refusal(token_config(issuer), f"{head}.{claims}.{signature}")


def test_critical_extensions_are_refused(issuer):
    header = {"alg": "RS256", "typ": "JWT", "kid": "rsa-1", "crit": ["x"], "x": 1}
    message = raw_token(header, issuer.claims()).rpartition(".")[0]

    text = refusal(token_config(issuer), raw_token(header, issuer.claims(), sign_rs256(message)))
    assert "extensions" in text or "no JSON Web Token" in text


@pytest.mark.parametrize("token", ["", "abc", "a.b.c", "ey.ey.ey", "....", "é.é.é", "x" * 16384])
def test_what_is_no_token_is_refused(issuer, token):
    with pytest.raises(IdentityRefused):
        authenticator(token_config(issuer)).check(token, NOW)


def test_issuers_keys_are_not_mixed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    good = TestIssuer(tmp_path / "a", "https://a.test")
    evil = TestIssuer(tmp_path / "b", "https://b.test")
    evil.keys = {"rsa-1": rsa_key("evil")}
    evil.publish()
    config = token_config(good, issuers=tuple(Issuer(issuer=i.issuer, keys_file=i.keys_file) for i in (good, evil)))

    assert authenticator(config).check(evil.token(), NOW).tenant == "team-a"
    assert "signature" in refusal(config, evil.token(iss=good.issuer))


def test_rotated_keys_are_read_when_the_file_changes(issuer):
    known = authenticator(token_config(issuer))
    issuer.keys["rsa-2"] = rsa_key("rsa-2")
    token = issuer.token("rsa-2")
    with pytest.raises(IdentityRefused):
        known.check(token, NOW)

    issuer.publish()

    assert known.check(token, NOW).tenant == "team-a"


@pytest.mark.parametrize("damage", ["broken", "gone"])
def test_damaged_key_file_keeps_the_former_keys_and_warns(issuer, damage):
    known = authenticator(token_config(issuer))
    if damage == "broken":
        Path(issuer.keys_file).write_text('{"keys": [')
    else:
        Path(issuer.keys_file).unlink()

    with capture_logs() as logs:
        assert known.check(issuer.token(), NOW).tenant == "team-a"
    assert [line["event"] for line in logs] == ["credentials.unreadable"]


@pytest.mark.parametrize(
    "keys",
    [
        "{}",
        "[]",
        "nonsense",
        '{"keys": []}',
        '{"keys": 5}',
        json.dumps({"keys": [{"kty": "oct", "kid": "s", "k": "c2VjcmV0"}]}),
        json.dumps({"keys": [jwk(rsa_key("weak", 1024), "weak")]}),
        json.dumps({"keys": [jwk(ec_key("ec-1"), "p", crv="P-999")]}),
    ],
)
def test_key_set_without_a_usable_key_stops_the_start(issuer, keys):
    Path(issuer.keys_file).write_text(keys)

    with pytest.raises(CredentialError, match=r"keys\.json"):
        authenticator(token_config(issuer))


def test_missing_key_file_stops_the_start(issuer):
    Path(issuer.keys_file).unlink()

    with pytest.raises(CredentialError, match="mount the file"):
        authenticator(token_config(issuer))


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("long random text\n")
    return path


@pytest.mark.parametrize("end", ["", "\n"])
def test_right_secret_gives_the_configured_tenant(secret_file, end):
    """A file's last line end is no part of it, on either side."""
    config = AuthConfig(kind=AuthKind.SECRET, secret_file=str(secret_file), tenant="t")

    identity = authenticator(config).check("long random text" + end, NOW)

    assert (identity.tenant, identity.label, identity.expires_in_s) == ("t", "", None)


@pytest.mark.behaviour("D041")
@pytest.mark.parametrize("given", ["", "wrong", "long random tex", "long random text and more"])
def test_wrong_secret_is_refused_without_being_repeated(secret_file, given):
    known = authenticator(AuthConfig(kind=AuthKind.SECRET, secret_file=str(secret_file)))

    with pytest.raises(IdentityRefused) as caught:
        known.check(given, NOW)
    assert "long random" not in str(caught.value)
    assert not given or given not in str(caught.value)


def test_changed_secret_holds_at_once(secret_file):
    known = authenticator(AuthConfig(kind=AuthKind.SECRET, secret_file=str(secret_file)))
    secret_file.write_text("another text of another length")

    known.check("another text of another length", NOW)
    with pytest.raises(IdentityRefused):
        known.check("long random text", NOW)


def test_empty_secret_stops_the_start(secret_file):
    secret_file.write_text("\n")

    with pytest.raises(CredentialError, match="empty"):
        authenticator(AuthConfig(kind=AuthKind.SECRET, secret_file=str(secret_file)))


def test_no_authentication_takes_anybody_for_the_configured_tenant():
    assert authenticator(AuthConfig(tenant="only")).check("anything", NOW).tenant == "only"
