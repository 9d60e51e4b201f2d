# SPDX-License-Identifier: Apache-2.0
"""For how much L1 a pool's pods are made: as much as asked for, or as much as the present ones have room for.

Servers take another ``l1.size`` while they run. So a pod template made for a larger one stays as it is, and no pod is
replaced; only what does not fit into it, or a template that changes anyway, is made for the size asked for.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Provision
from kvpool_operator.spec.pool import Pool
from kvpool_operator.spec.quantity import Size

__all__ = ["digest_of", "known_provision", "provisioned_bytes", "with_size"]

_MOST: Final = 16
"""A server's segments are cut for what it may grow to; it takes no less than a sixteenth of that."""


def known_provision(metadata: Iterable[Mapping[str, Any]]) -> Provision | None:
    """What the annotations of a pool's objects remember; None if they say nothing that can be read."""
    for annotations in (m.get("annotations") or {} for m in metadata):
        text, template = annotations.get(names.L1_PROVISIONED, ""), annotations.get(names.TEMPLATE, "")
        if text.isdigit() and template:
            return Provision(int(text), template)
    return None


def provisioned_bytes(pool: Pool, known: Provision | None, template: str) -> int:
    """Bytes of L1 that pods are to have memory for; *template* is the digest of the rest of what they are made from."""
    size = int(pool.spec.l1.size)
    if known is not None and known.template == template and size <= known.l1_bytes <= _MOST * size:
        return known.l1_bytes
    return size


def with_size(pool: Pool, l1_bytes: int) -> Pool:
    """Return *pool* as if it asked for that much."""
    l1 = msgspec.structs.replace(pool.spec.l1, size=Size(l1_bytes))
    return msgspec.structs.replace(pool, spec=msgspec.structs.replace(pool.spec, l1=l1))


def digest_of(template: Mapping[str, Any]) -> str:
    """A short name of *template* that another one does not have."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
