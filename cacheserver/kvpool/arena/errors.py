# SPDX-License-Identifier: Apache-2.0
"""Why an arena cannot be opened."""

__all__ = ["ArenaError"]


class ArenaError(Exception):
    """The arena cannot be opened as configured; the text names the field, the numbers and the remedy."""
