# SPDX-License-Identifier: Apache-2.0
"""Certificates of a local control plane: one authority, one serving pair, a pair for each user."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Authority", "write_service_account_key"]

_LIFE = dt.timedelta(days=2)


class Authority:
    """A certificate authority whose files live in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("kvpool-test-ca", ())
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "ca.crt"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def serving(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]:
        """Write a pair for a server that answers on *hosts*; returns certificate and key."""
        names = x509.SubjectAlternativeName([_host(h) for h in hosts])
        return self._issue(name, _name(name, ()), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, file: str, user: str, groups: Sequence[str] = ()) -> tuple[Path, Path]:
        """Write a pair that makes its bearer *user* in *groups*; returns certificate and key."""
        return self._issue(file, _name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _issue(
        self, file: str, subject: x509.Name, usage: x509.ObjectIdentifier, names: x509.SubjectAlternativeName | None
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._name, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        paths = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(_pem(key))
        return paths


def write_service_account_key(folder: Path) -> tuple[Path, Path]:
    """Write the pair that signs service-account tokens; returns private and public half."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private, public = folder / "sa.key", folder / "sa.pub"
    private.write_bytes(_pem(key))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, g) for g in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _LIFE)
    )
