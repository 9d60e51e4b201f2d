# SPDX-License-Identifier: Apache-2.0
"""Who a client is: from its credential and the pool's configuration, never from its word.

Checks are offline: issuers' public keys come from files, which are read again when they change. The wall clock is
passed in. An error says what is wrong with a credential and never repeats any part of it.

Which namespaces are admitted and whose tenants they are may change while the server runs; how an identity is proven may
not.
"""

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from kvpool.config import AuthConfig, AuthKind
from kvpool.model.errors import IdentityRefused

__all__ = ["Authenticator", "CredentialError", "Identity", "WatchedFile", "authenticator"]

log = structlog.get_logger()

T = TypeVar("T")


class CredentialError(Exception):
    """A file that identities are checked with cannot be used; the text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a credential proves."""

    tenant: str
    label: str
    """The pod's name; empty if the credential does not say."""

    expires_in_s: float | None
    """How long it holds; None for ever."""

    namespace: str | None = None
    """The pod's namespace; None if the credential does not say."""


class Authenticator(Protocol):
    """Turns credentials into identities."""

    def check(self, credential: str, wall_s: float) -> Identity:
        """Return who presents *credential* at *wall_s* (seconds since 1970).

        Raises:
            IdentityRefused: it proves nothing here; the text says why.
        """

    def tenant_of(self, namespace: str | None) -> str:
        """Return the tenant of clients whose credential shows *namespace*, as things stand now.

        Raises:
            IdentityRefused: they are not admitted.
        """

    def follow(self, config: AuthConfig) -> None:
        """Take namespaces and tenants from *config*; all else stays as it was at the start."""


def authenticator(config: AuthConfig) -> Authenticator:
    """Return the authenticator that *config* asks for, its files read.

    Raises:
        CredentialError: a file is missing or unusable.
    """
    match config.kind:
        case AuthKind.NONE:
            return _Anybody(config)
        case AuthKind.SECRET:
            return _Secret(config)
        case AuthKind.TOKEN:
            # The library for tokens is the slowest import of the server; a pool without them does not wait for it.
            from kvpool.server.tokens import TokenAuthenticator  # noqa: PLC0415

            return TokenAuthenticator(config)


class _OneTenant:
    """Clients whose credentials say nothing of where they come from."""

    def __init__(self, config: AuthConfig) -> None:
        self._identity = Identity(config.tenant, "", None)

    def tenant_of(self, namespace: str | None) -> str:  # noqa: ARG002 - none of them shows one
        return self._identity.tenant

    def follow(self, config: AuthConfig) -> None:
        self._identity = Identity(config.tenant, "", None)


class _Anybody(_OneTenant):
    """Whoever can open the private socket."""

    def check(self, credential: str, wall_s: float) -> Identity:  # noqa: ARG002 - any credential will do, at any time
        return self._identity


class WatchedFile(Generic[T]):
    """What a file holds, read again when it has changed; a change that does not parse keeps the former content."""

    def __init__(self, path: str, parse: Callable[[bytes], T]) -> None:
        """Read *path*.

        Raises:
            CredentialError: it cannot be read or does not parse.
        """
        self._path = path
        self._parse = parse
        self._stamp: tuple[int, int, int] | None = None
        self._value = self._read()

    def value(self) -> T:
        """Return what the file holds now."""
        try:
            if _stamp(self._path) != self._stamp:
                self._value = self._read()
        except CredentialError as e:
            log.warning("credentials.unreadable", error=str(e))
        except OSError as e:
            log.warning(
                "credentials.unreadable", error=f"{self._path}: {e.strerror}; the former content stays in force"
            )
        return self._value

    def _read(self) -> T:
        try:
            # The stamp first: a change after it is seen by the next check.
            self._stamp = _stamp(self._path)
            return self._parse(Path(self._path).read_bytes())
        except OSError as e:
            raise CredentialError(f"{self._path}: {e.strerror}; mount the file or name another") from e
        except ValueError as e:
            raise CredentialError(f"{self._path}: {e}") from e


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(path)  # noqa: PTH116 - Path.stat would build an object for every Hello
    return found.st_mtime_ns, found.st_ino, found.st_size


class _Secret(_OneTenant):
    """Whoever knows the shared secret."""

    def __init__(self, config: AuthConfig) -> None:
        super().__init__(config)
        self._digest = WatchedFile(config.secret_file, _secret_digest)

    def check(self, credential: str, wall_s: float) -> Identity:  # noqa: ARG002 - a secret does not expire
        given = hashlib.sha256(credential.strip().encode()).digest()
        if not hmac.compare_digest(given, self._digest.value()):
            raise IdentityRefused("the shared secret is missing or not this pool's; check the client's secret_file")
        return self._identity


def _secret_digest(data: bytes) -> bytes:
    secret = data.strip()
    if not secret:
        raise ValueError("is empty; write a long random text into it")
    return hashlib.sha256(secret).digest()
