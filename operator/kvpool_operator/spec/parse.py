# SPDX-License-Identifier: Apache-2.0
"""Raw custom resource in, Pool out; nobody further in sees a raw dict of the user's."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvpool_operator.errors import InvalidPool
from kvpool_operator.spec.pool import Pool, PoolSpec
from kvpool_operator.spec.quantity import Duration, Size
from kvpool_operator.spec.report import PoolStatus

__all__ = ["dump", "parse_pool", "parse_status"]


def parse_pool(body: Mapping[str, Any]) -> Pool:
    """Turn a raw KVCachePool into a Pool.

    Raises:
        InvalidPool: a field is missing or wrong; the text names its path.
    """
    metadata = body.get("metadata") or {}
    try:
        return Pool(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=int(metadata.get("generation", 0)),
            spec=msgspec.convert(body.get("spec", {}), PoolSpec, dec_hook=_decode),
        )
    except KeyError as e:
        raise InvalidPool(f"metadata.{e.args[0]}: missing") from e
    except msgspec.ValidationError as e:
        raise InvalidPool(str(e).replace("$.", "spec.").replace("$", "spec")) from e


def parse_status(body: Mapping[str, Any]) -> PoolStatus:
    """Read the status that stands in *body*; what cannot be read counts as not there."""
    try:
        return msgspec.convert(body.get("status") or {}, PoolStatus)
    except msgspec.ValidationError:
        return PoolStatus()


def dump(value: msgspec.Struct) -> dict[str, Any]:
    """Turn a section or a status into plain JSON values, each of them new."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return plain


def _decode(kind: type, value: object) -> object:
    if kind in (Size, Duration):
        parsed: object = kind.parse(value)
        return parsed
    raise NotImplementedError(kind)
