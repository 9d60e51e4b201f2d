# SPDX-License-Identifier: Apache-2.0
"""The Secret with a pool's private CURVE key. It is created once and never read: 409 means that it is there."""

from typing import Any

from kvpool_operator.desired import names
from kvpool_operator.spec.pool import Pool

__all__ = ["key_secret"]


def key_secret(pool: Pool, server_key: str, private_key: str) -> dict[str, Any]:
    """The Secret of the pair *server_key* (public) and *private_key*, both Z85."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": names.metadata(pool, names.key_secret(pool, server_key)),
        "stringData": {"secret": private_key},
    }
