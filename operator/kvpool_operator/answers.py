# SPDX-License-Identifier: Apache-2.0
"""Pure: what the API server answers, as our errors."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Final

from kvpool_operator.errors import Absent, Busy, Conflict, Forbidden, OperatorError, Rejected

__all__ = ["error_of", "message_of", "undeclared"]

_UNDECLARED: Final = re.compile(r"\.status\.(\w+)[^:]*: field not declared in schema")
_GONE: Final = 410

_BY_STATUS: Final[dict[int, type[OperatorError]]] = {
    400: Rejected,
    401: Busy,  # the token was renewed under us; the next call reads the new one
    403: Forbidden,
    404: Absent,
    405: Absent,
    409: Conflict,
    _GONE: Busy,
    413: Rejected,
    415: Rejected,
    422: Rejected,
}


def error_of(call: str, status: int | None, body: object, headers: Mapping[str, str] | None) -> OperatorError:
    """The error that says what to do; everything unknown counts as passing.

    Args:
        call: method and path, for people.
        status: HTTP's, None if there was none.
        body: the API server's own words.
        headers: of the answer.
    """
    message = f"{call}: {status}: {message_of(body)}"
    kind = _BY_STATUS.get(status or 0, Busy)
    if kind is Busy:
        return Busy(message, _retry_after(headers or {}))
    return kind(message)


def message_of(body: object) -> str:
    """The API server's own words, cut to a length for people."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    with contextlib.suppress(json.JSONDecodeError, AttributeError):
        text = str(json.loads(text).get("message", text))
    return text[:500]


def undeclared(text: str) -> str | None:
    """The section of a status that an older schema on the API server does not know, or None."""
    found = _UNDECLARED.search(text)
    return found.group(1) if found else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None
