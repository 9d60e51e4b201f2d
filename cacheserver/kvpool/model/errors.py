# SPDX-License-Identifier: Apache-2.0
"""Every failure that a server reports, one code each; the same class is raised on both sides of the wire.

    CacheError
    |- Retryable            the same call may succeed later
    |  |- PoolFull
    |  |- Busy
    |  |- Draining
    |  |- DeadlineExceeded
    |  |- ServerUnavailable (made by the client, never sent)
    |  |- StaleBoot
    |  `- NotRegistered     say Hello (and Register) again, then repeat
    |     `- IdentityExpired
    `- Refused              the same call can never succeed
       |- Malformed
       |- UnknownRequest
       |- VersionMismatch
       |- SelfTestFailed
       |- IdentityRefused
       |- LayoutRefused
       |- LimitExceeded
       |- InvalidRange
       |- UnknownLease
       `- RoleForbidden

A miss is a value, never an error.
"""

from collections.abc import Iterator
from typing import ClassVar

__all__ = [
    "BY_CODE",
    "Busy",
    "CacheError",
    "DeadlineExceeded",
    "Draining",
    "IdentityExpired",
    "IdentityRefused",
    "InvalidRange",
    "LayoutRefused",
    "LimitExceeded",
    "Malformed",
    "NotRegistered",
    "PoolFull",
    "Refused",
    "Retryable",
    "RoleForbidden",
    "SelfTestFailed",
    "ServerUnavailable",
    "StaleBoot",
    "UnknownLease",
    "UnknownRequest",
    "VersionMismatch",
]


class CacheError(Exception):
    """Base of all failures reported by a cache server."""

    code: ClassVar[str] = "internal"


class Retryable(CacheError):
    """The same call may succeed later."""


class Refused(CacheError):
    """The same call can never succeed."""


class PoolFull(Retryable):
    """No slot could be freed: every entry is held."""

    code = "pool_full"


class Busy(Retryable):
    """A queue or a number of requests in flight is at its limit."""

    code = "busy"


class Draining(Retryable):
    """The server is shutting down and takes no new work."""

    code = "draining"


class DeadlineExceeded(Retryable):
    """The request's time ran out before it was answered."""

    code = "deadline_exceeded"


class ServerUnavailable(Retryable):
    """No server answers at this address; raised by the client alone."""

    code = "server_unavailable"


class StaleBoot(Retryable):
    """The server restarted since the operation began: what it handed out then is void."""

    code = "stale_boot"


class NotRegistered(Retryable):
    """The server does not know this client: say Hello and Register, then repeat the call."""

    code = "not_registered"


class IdentityExpired(NotRegistered):
    """The token that proved this client's identity ran out: renew it, then repeat the call."""

    code = "identity_expired"


class Malformed(Refused):
    """A frame does not decode, is missing, or has the wrong length."""

    code = "malformed"


class UnknownRequest(Refused):
    """The server's version has no such request."""

    code = "unknown_request"


class VersionMismatch(Refused):
    """Client and server have no protocol version in common."""

    code = "version_mismatch"


class SelfTestFailed(Refused):
    """Client and server derive different digests from the same tokens: nothing would ever hit."""

    code = "self_test_failed"


class IdentityRefused(Refused):
    """The credential is missing, forged, for another audience or of a tenant that the pool does not admit."""

    code = "identity_refused"


class LayoutRefused(Refused):
    """The layout cannot be kept by this server; the text says which number does not fit."""

    code = "layout_refused"


class LimitExceeded(Refused):
    """The request is larger than the server's limits allow."""

    code = "limit_exceeded"


class InvalidRange(Refused):
    """A chunk range, shard, group or offset lies outside what was registered, looked up or reserved."""

    code = "invalid_range"


class UnknownLease(Refused):
    """The lookup or store id is not known: it ended, expired, or never was."""

    code = "unknown_lease"


class RoleForbidden(Refused):
    """The client's role does not allow this verb (a consumer that stores, a producer that loads)."""

    code = "role_forbidden"


def _walk(cls: type[CacheError]) -> Iterator[type[CacheError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _walk(sub)


# Abstract branches inherit "internal" and must not shadow the base.
BY_CODE: dict[str, type[CacheError]] = {cls.code: cls for cls in _walk(CacheError) if "code" in vars(cls)}
