# SPDX-License-Identifier: Apache-2.0
"""All failures of the operator; a branch says what the caller can do about it.

OperatorError
    Permanent            the same input fails again; report it and wait for a change
        InvalidPool      the pool's spec is wrong
        Rejected         the API server refuses an object for what is in it
        Forbidden        the operator lacks a right
    Retryable            the same call may succeed later
        Busy             the API server is away, overloaded, or asks to wait
        Conflict         somebody else wrote in between
    Absent               the object, or its kind, does not exist
"""

__all__ = [
    "Absent",
    "Busy",
    "Conflict",
    "Forbidden",
    "InvalidPool",
    "OperatorError",
    "Permanent",
    "Rejected",
    "Retryable",
]


class OperatorError(Exception):
    """Base of all failures."""


class Permanent(OperatorError):
    """The same input fails again."""


class InvalidPool(Permanent):
    """The pool's spec is wrong; the text names the field."""


class Rejected(Permanent):
    """The API server refuses an object for what is in it."""


class Forbidden(Permanent):
    """The operator lacks a right; the text names verb and kind."""


class Retryable(OperatorError):
    """The same call may succeed later."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s
        """Seconds that the API server asks to wait, or None."""


class Busy(Retryable):
    """The API server is away, overloaded, or asks to wait."""


class Conflict(Retryable):
    """Somebody else wrote in between."""


class Absent(OperatorError):
    """The object, or its kind, does not exist."""
