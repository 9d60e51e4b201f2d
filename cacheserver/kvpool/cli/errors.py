# SPDX-License-Identifier: Apache-2.0
"""What a command tells its user instead of a traceback; imports nothing, so that `kvpool --help` stays fast."""

from typing import ClassVar

__all__ = ["CommandError", "Failure", "UsageError"]


class CommandError(Exception):
    """Ends a command: the text, which names what is wrong and the remedy, goes to standard error."""

    exit_code: ClassVar[int] = 1


class Failure(CommandError):
    """The command was understood and could not be done."""


class UsageError(CommandError):
    """An option or a configured value is wrong."""

    exit_code: ClassVar[int] = 2
