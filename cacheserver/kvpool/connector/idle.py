# SPDX-License-Identifier: Apache-2.0
"""Transfers of an engine without a cache."""

from collections.abc import Iterable

from kvpool.client.jobs import Finished

__all__ = ["NoTransfers"]


class NoTransfers:
    """Transfers of an engine without a cache."""

    def store(self, job: object) -> None:
        """Keep nothing."""

    def load(self, job: object) -> None:
        """Never called: the half is off."""

    def poll(self) -> Finished:
        """Nothing ends."""
        return Finished(frozenset(), {})

    def has_stores(self, request_id: str) -> bool:  # noqa: ARG002 - the port's signature
        """Nothing is read."""
        return False

    def cancel_stores(self, request_ids: Iterable[str], timeout_s: float) -> bool:  # noqa: ARG002 - the port's signature
        """Nothing is read."""
        return True

    def settle_stores(self, jobs: object, patience_s: float, timeout_s: float) -> bool:  # noqa: ARG002 - as above
        """Nothing is read."""
        return True

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""
