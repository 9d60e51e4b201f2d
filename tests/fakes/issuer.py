# SPDX-License-Identifier: Apache-2.0
"""An issuer of service-account tokens with keys of its own, and every way to get a token wrong."""

import base64
import functools
import json
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

ISSUER = "https://issuer.test"
AUDIENCE = "kvpool.test/pool"
NOW = 1_700_000_000.0


@functools.cache
def rsa_key(name, bits=2048):
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def ec_key(name):
    return ec.generate_private_key(ec.SECP256R1())


def jwk(key, kid, **extra):
    if isinstance(key, rsa.RSAPrivateKey):
        public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        public = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": kid, "use": "sig", **extra}


def public_pem(key):
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class TestIssuer:
    """Signs tokens; its key set lies in a file."""

    __test__ = False

    def __init__(self, folder: Path, issuer=ISSUER):
        self.issuer = issuer
        self.keys_file = str(folder / "keys.json")
        self.keys = {"rsa-1": rsa_key("rsa-1"), "ec-1": ec_key("ec-1")}
        self.publish()

    def publish(self, *more):
        items = [jwk(key, kid) for kid, key in self.keys.items()]
        Path(self.keys_file).write_text(json.dumps({"keys": [*items, *more]}))

    def claims(self, namespace="team-a", pod="engine-0", now=NOW, **changes):
        base = {
            "iss": self.issuer,
            "aud": [AUDIENCE],
            "iat": now - 10,
            "nbf": now - 10,
            "exp": now + 600,
            "sub": f"system:serviceaccount:{namespace}:default",
            "kubernetes.io": {
                "namespace": namespace,
                "pod": {"name": pod, "uid": "4f6f9e0c"},
                "serviceaccount": {"name": "default"},
            },
        }
        return {k: v for k, v in (base | changes).items() if v is not None}

    def token(self, kid="rsa-1", headers=None, **claims):
        key = self.keys[kid]
        algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        headers = {"kid": kid, **(headers or {})}
        return jwt.encode(self.claims(**claims), key, algorithm, headers={k: v for k, v in headers.items() if v})


def raw_token(header, claims, signature=b""):
    """A token of any header and signature, made by hand: libraries refuse to sign most wrong ones."""

    def part(value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    return f"{part(header)}.{part(claims)}.{part(signature)}"
