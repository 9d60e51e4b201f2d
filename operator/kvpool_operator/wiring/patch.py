# SPDX-License-Identifier: Apache-2.0
"""The difference of two JSON values as a JSON patch (RFC 6902). What is the same on both sides is never named."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Operation", "difference"]

Operation = dict[str, Any]


def difference(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Operations that make *after* of *before*; none if they are equal.

    A list grows at its end and changes in its items; where it shrinks it is written whole.
    """
    return list(_difference(before, after, path))


def _difference(before: Any, after: Any, path: str) -> Iterator[Operation]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list) and before and len(before) <= len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from _difference(old, new, f"{path}/{index}")
        for new in after[len(before) :]:
            yield {"op": "add", "path": f"{path}/-", "value": new}
    else:
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[Operation]:
    for key in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in after.items():
        if key in before:
            yield from _difference(before[key], value, f"{path}/{_escaped(key)}")
        else:
            yield {"op": "add", "path": f"{path}/{_escaped(key)}", "value": value}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
