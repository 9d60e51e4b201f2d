# SPDX-License-Identifier: Apache-2.0
"""What a check finds."""

from enum import StrEnum

from msgspec import Struct

__all__ = ["Check", "Level", "fail", "ok", "warn"]


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Struct, frozen=True, kw_only=True):
    """One finding."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Check:
    """Return that all is well."""
    return Check(name=name, level=Level.OK, text=text)


def warn(name: str, text: str, remedy: str) -> Check:
    """Return that something works less well than it could."""
    return Check(name=name, level=Level.WARN, text=text, remedy=remedy)


def fail(name: str, text: str, remedy: str) -> Check:
    """Return that something does not work."""
    return Check(name=name, level=Level.FAIL, text=text, remedy=remedy)
