# SPDX-License-Identifier: Apache-2.0
"""Ends that came before what they end."""

from collections.abc import Hashable

__all__ = ["Tombstones"]


class Tombstones:
    """Remembers keys for a fixed time, and not more than a fixed number of them."""

    def __init__(self, keep_s: float, most: int) -> None:
        """Remember each key for *keep_s*, the *most* recent ones alone."""
        self._keep_s = keep_s
        self._most = most
        self._until_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def leave(self, key: Hashable, now_s: float) -> None:
        """Remember *key*."""
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + self._keep_s
        if len(self._until_s) > self._most:
            del self._until_s[next(iter(self._until_s))]

    def take(self, key: Hashable, now_s: float) -> bool:
        """Say whether *key* is remembered; it is forgotten by that, since it was overtaken once."""
        until_s = self._until_s.pop(key, None)
        return until_s is not None and now_s < until_s

    def expire(self, now_s: float) -> None:
        """Forget keys whose time is over."""
        while self._until_s and (until := next(iter(self._until_s.items())))[1] <= now_s:
            del self._until_s[until[0]]

    def next_s(self) -> float | None:
        """Return when the oldest key is to be forgotten."""
        return next(iter(self._until_s.values()), None)
