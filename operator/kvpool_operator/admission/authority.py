# SPDX-License-Identifier: Apache-2.0
"""Pure but for the dice: certificates of the admission server, and when which of them is trusted and which served.

Each serving pair has an authority of its own whose key is thrown away at once, so nothing that could sign is kept. A
new pair is first *next*: its authority is trusted beside the other one. Once every API server must have seen that, it
is served, and the former authority is trusted a while longer as *old*.
"""

import datetime as dt
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Certificates", "Pair", "Step", "due", "issue", "taken", "trusts"]

_BACKDATED: Final = dt.timedelta(minutes=5)
"""Clocks of a cluster differ a little."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A serving certificate with its key, and the authority that signed it; all PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    def expires_at(self) -> dt.datetime:
        """When it ends.

        Raises:
            ValueError: it is no certificate.
        """
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def serves(self, names: Sequence[str]) -> bool:
        """True if it is a certificate for all of *names*."""
        try:
            found = x509.load_pem_x509_certificate(self.certificate)
            listed = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            return False
        return {_general(n) for n in names} <= set(listed) and trusts(self.authority, self.certificate)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What stands in the Secret."""

    current: Pair | None = None
    next: Pair | None = None
    old: bytes = b""
    """An authority that is still trusted."""
    since: dt.datetime | None = None
    """When the last step was taken."""

    @property
    def bundle(self) -> bytes:
        """All authorities that are trusted now."""
        pairs = [p.authority for p in (self.current, self.next) if p is not None]
        return b"".join([*pairs, self.old])

    def data(self) -> dict[str, bytes]:
        """As entries of a Secret of the type for TLS."""
        found: dict[str, bytes] = {"tls.crt": b"", "tls.key": b"", "old-ca.crt": self.old}
        for prefix, pair in (("", self.current), ("next-", self.next)):
            if pair is not None:
                found |= {f"{prefix}tls.crt": pair.certificate, f"{prefix}tls.key": pair.key}
                found |= {f"{prefix}ca.crt": pair.authority}
        if self.since is not None:
            found["since"] = self.since.isoformat().encode()
        return {name: value for name, value in found.items() if value or name.startswith("tls.")}

    @classmethod
    def of(cls, data: Mapping[str, bytes]) -> Self:
        """Read *data*; what is missing or damaged is as if it had never been."""
        try:
            since = dt.datetime.fromisoformat(data.get("since", b"").decode())
        except ValueError:
            since = None
        return cls(_pair(data, ""), _pair(data, "next-"), data.get("old-ca.crt", b""), since)


class Step(Enum):
    """What is to be done with the certificates now."""

    KEEP = auto()
    ISSUE = auto()
    """There is none that can be served; its successor must be served at once."""
    STAGE = auto()
    SWITCH = auto()
    DROP = auto()


def due(found: Certificates, names: Sequence[str], now: dt.datetime, life_s: float, settle_s: float) -> Step:
    """Say which step *found* needs at *now*."""
    current, settled = found.current, found.since is None or (now - found.since).total_seconds() >= settle_s
    if current is None or not current.serves(names) or current.expires_at() <= now:
        return Step.ISSUE
    if found.next is not None:
        if not found.next.serves(names):
            return Step.STAGE
        return Step.SWITCH if settled else Step.KEEP
    if found.old:
        return Step.DROP if settled else Step.KEEP
    remains_s = (current.expires_at() - now).total_seconds()
    return Step.STAGE if remains_s < life_s / 3 else Step.KEEP


def taken(
    found: Certificates, names: Sequence[str], now: dt.datetime, life_s: float, settle_s: float
) -> Certificates | None:
    """The certificates after the step that is due; None if there is nothing to do."""
    match due(found, names, now, life_s, settle_s):
        case Step.ISSUE:
            former = found.current.authority if found.current else b""
            return Certificates(issue(names, now, life_s), None, former, now)
        case Step.STAGE:
            return replace(found, next=issue(names, now, life_s), since=now)
        case Step.SWITCH:
            former = found.current.authority if found.current else b""
            return Certificates(found.next, None, former, now)
        case Step.DROP:
            return replace(found, old=b"", since=now)
        case Step.KEEP:
            return None


def issue(names: Sequence[str], now: dt.datetime, life_s: float) -> Pair:
    """A fresh pair that is served on *names* for *life_s* seconds."""
    signer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    end = now + dt.timedelta(seconds=life_s)
    issuer = _subject(f"kvpool webhook authority {now:%Y-%m-%dT%H:%M:%S.%f}")
    authority = (
        _builder(issuer, issuer, signer.public_key(), now, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    certificate = (
        _builder(_subject("kvpool webhook"), issuer, key.public_key(), now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(_pem(certificate), plain, _pem(authority))


def trusts(bundle: bytes, certificate: bytes) -> bool:
    """True if an authority in *bundle* signed *certificate*."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate)
        authorities = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return False
    return any(_signed(leaf, authority) for authority in authorities)


def _signed(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _pair(data: Mapping[str, bytes], prefix: str) -> Pair | None:
    parts = [data.get(f"{prefix}{name}", b"") for name in ("tls.crt", "tls.key", "ca.crt")]
    try:
        x509.load_pem_x509_certificate(parts[0])
        serialization.load_pem_private_key(parts[1], None)
    except (ValueError, TypeError):
        return None
    return Pair(*parts)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
