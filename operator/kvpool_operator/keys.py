# SPDX-License-Identifier: Apache-2.0
"""The pool's CURVE key: made once, the private half written into a Secret that is never read.

Whether the Secret is still there is asked by a trial run of creating it. The public half stands in annotations of the
client's ConfigMap and of the DaemonSet, so that losing one of them costs nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import zmq

from kvpool_operator.cluster import SECRETS, Cluster
from kvpool_operator.desired import key_secret, names
from kvpool_operator.spec import Pool

__all__ = ["ensure_key", "known_key", "new_pair"]


def new_pair() -> tuple[str, str]:
    """A fresh pair, public half first, both Z85."""
    public, private = zmq.curve_keypair()
    return public.decode(), private.decode()


def known_key(metadata: Iterable[Mapping[str, Any]]) -> str:
    """The public key that the pool's objects remember; empty if none does."""
    found = (m.get("annotations", {}).get(names.SERVER_KEY) for m in metadata)
    return next((key for key in found if key), "")


async def ensure_key(
    cluster: Cluster, pool: Pool, known: str, make_pair: Callable[[], tuple[str, str]] = new_pair
) -> str:
    """Return the public half of a key whose Secret exists; *known* is the one in use so far.

    Raises:
        OperatorError: the Secret cannot be created.
    """
    if known and not await cluster.create(SECRETS, pool.namespace, key_secret(pool, known, "trial"), dry_run=True):
        return known
    public, private = make_pair()
    await cluster.create(SECRETS, pool.namespace, key_secret(pool, public, private))
    return public
