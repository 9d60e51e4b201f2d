# SPDX-License-Identifier: Apache-2.0
"""What acts of the demo share."""

__all__ = ["ActSkipped", "say"]


class ActSkipped(Exception):
    """The act cannot be played here; the text says why, in one line."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
