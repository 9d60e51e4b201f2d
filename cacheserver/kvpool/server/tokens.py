# SPDX-License-Identifier: Apache-2.0
"""Service-account tokens, checked offline against the issuers' public keys."""

from typing import Any, Final

import jwt
from jwt.exceptions import PyJWTError
from jwt.types import Options

from kvpool.config import AuthConfig
from kvpool.model.errors import IdentityRefused
from kvpool.server.identity import Identity, WatchedFile

__all__ = ["TokenAuthenticator"]

_ALGORITHMS: Final = ("RS256", "ES256")
_RSA_BITS: Final = 2048
_LATEST_AT: Final = 1e12
_CLUSTER_CLAIM: Final = "kubernetes.io"
_NAME_BYTES: Final = 128
# The library would read the clock itself, and its errors would quote the token's claims.
_SIGNATURE_ALONE: Final[Options] = {
    "verify_aud": False,
    "verify_exp": False,
    "verify_iat": False,
    "verify_iss": False,
    "verify_jti": False,
    "verify_nbf": False,
    "verify_sub": False,
}


class TokenAuthenticator:
    """Whoever presents a token that a trusted issuer signed for this pool."""

    def __init__(self, config: AuthConfig) -> None:
        self._config = self._names = config
        self._keys = {i.issuer: WatchedFile(i.keys_file, _parse_keys) for i in config.issuers}

    def check(self, credential: str, wall_s: float) -> Identity:
        """Return whose token it is; see ``Authenticator``.

        Raises:
            IdentityRefused: it proves nothing here.
        """
        if not credential:
            raise IdentityRefused("this pool wants a service-account token and none came; set the client's token_file")
        claims = self._verified(credential)
        expires_in_s = self._check_times(claims, wall_s)
        namespace, pod = _cluster_names(claims)
        return Identity(self.tenant_of(namespace), pod, expires_in_s, namespace)

    def tenant_of(self, namespace: str | None) -> str:
        """Return whose tenant pods of *namespace* are; see ``Authenticator``.

        Raises:
            IdentityRefused: they are not admitted.
        """
        names = self._names
        if names.namespaces and namespace not in names.namespaces:
            raise IdentityRefused("this pool does not admit pods of the token's namespace")
        return names.tenant if namespace is None else names.tenants.get(namespace, namespace)

    def follow(self, config: AuthConfig) -> None:
        """Take namespaces and tenants from *config*; see ``Authenticator``."""
        self._names = config

    def _verified(self, token: str) -> dict[str, Any]:
        """Return the claims, once the signature, the issuer and the audience are right."""
        try:
            header = jwt.get_unverified_header(token)
            unverified = jwt.decode(token, options={"verify_signature": False})
        except (PyJWTError, ValueError) as e:
            raise IdentityRefused("the credential is no JSON Web Token") from e
        key = self._key(header, unverified.get("iss"))
        try:
            claims: dict[str, Any] = jwt.decode(token, key.key, [key.algorithm_name], options=_SIGNATURE_ALONE)
        except (PyJWTError, ValueError) as e:
            raise IdentityRefused("the token's signature does not verify with its issuer's key") from e
        self._check_audience(claims.get("aud"))
        return claims

    def _key(self, header: dict[str, Any], issuer: object) -> jwt.PyJWK:
        """Return the one key that may have signed; the algorithm is ours to choose, never the token's."""
        algorithm = header.get("alg")
        if algorithm not in _ALGORITHMS:
            raise IdentityRefused(f"the token's algorithm is none of {', '.join(_ALGORITHMS)}")
        if "crit" in header:
            raise IdentityRefused("the token's header demands extensions that this server does not know")
        watched = self._keys.get(issuer) if isinstance(issuer, str) else None
        if watched is None:
            raise IdentityRefused(f"the token's issuer is not trusted; this pool trusts {', '.join(self._keys)}")
        keys = watched.value()
        key = keys.get(header.get("kid"))
        if key is None:
            raise IdentityRefused(f"the token was signed with none of the {len(keys)} keys known of its issuer")
        if key.algorithm_name != algorithm:
            raise IdentityRefused("the token's algorithm does not fit the key that it names")
        return key

    def _check_audience(self, audience: object) -> None:
        named = [audience] if isinstance(audience, str) else audience
        if not isinstance(named, list) or self._config.audience not in named:
            raise IdentityRefused(f"the token is for another audience; this pool is {self._config.audience!r}")

    def _check_times(self, claims: dict[str, Any], wall_s: float) -> float:
        """Return for how long the token still holds, the allowed clock difference included."""
        leeway_s = self._config.leeway_s
        expires_at, valid_from, issued_at = (_time(claims, name) for name in ("exp", "nbf", "iat"))
        if expires_at is None:
            raise IdentityRefused("the token never expires; this pool takes only tokens that do")
        if wall_s >= expires_at + leeway_s:
            raise IdentityRefused(f"the token expired {wall_s - expires_at:.0f} s ago")
        if valid_from is not None and wall_s < valid_from - leeway_s:
            raise IdentityRefused(f"the token holds only in {valid_from - wall_s:.0f} s; check the clocks")
        if issued_at is not None and wall_s < issued_at - leeway_s:
            raise IdentityRefused(f"the token was issued {issued_at - wall_s:.0f} s in the future; check the clocks")
        return expires_at + leeway_s - wall_s


def _time(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    # Booleans are integers in Python; infinity would never expire, and comparisons with NaN are all false.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LATEST_AT:
        raise IdentityRefused(f"the token's {name} is no time")
    return float(value)


def _cluster_names(claims: dict[str, Any]) -> tuple[str | None, str]:
    """Return the namespace and the pod that the cluster wrote into a service-account token."""
    cluster = claims.get(_CLUSTER_CLAIM)
    if cluster is None:
        return None, ""
    if not isinstance(cluster, dict):
        raise IdentityRefused(f"the token's {_CLUSTER_CLAIM} claim is no object")
    namespace, pod = cluster.get("namespace"), cluster.get("pod")
    if not isinstance(namespace, str) or not 0 < len(namespace) <= _NAME_BYTES:
        raise IdentityRefused(f"the token's {_CLUSTER_CLAIM} claim names no namespace")
    name = pod.get("name") if isinstance(pod, dict) else None
    return namespace, name if isinstance(name, str) else ""


def _parse_keys(data: bytes) -> dict[str | None, jwt.PyJWK]:
    """Read a key set: the public keys that can verify an allowed algorithm, by key id.

    Raises:
        ValueError: it is no key set, or holds no such key.
    """
    try:
        items = jwt.PyJWKSet.from_json(data.decode()).keys
    except (PyJWTError, AttributeError, TypeError) as e:
        raise ValueError("holds no usable key; it must be a JSON Web Key Set with public keys") from e
    # A symmetric key would let everybody who can read the file sign.
    keys = {key.key_id: key for key in items if key.algorithm_name in _ALGORITHMS and _is_strong(key)}
    if not keys:
        raise ValueError(f"holds no key for {' or '.join(_ALGORITHMS)} (RSA from {_RSA_BITS} bits on)")
    return keys


def _is_strong(key: jwt.PyJWK) -> bool:
    return key.key_type != "RSA" or key.key.key_size >= _RSA_BITS
