# SPDX-License-Identifier: Apache-2.0
"""What one request asks of the cache, in its body: ``"kv_transfer_params": {"kvpool": {"store": false}}``.

    store            false: nothing of it is stored
    load             false: nothing is loaded for it
    max_load_tokens  no more than so many tokens, local ones among them, come from the cache

Who asks for something that cannot be understood gets neither: a wish to opt out must not be lost to a typing error.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["KEY", "Wishes", "wishes_of"]

KEY: Final = "kvpool"


class Wishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    store: bool = True
    load: bool = True
    max_load_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_load_tokens is not None and self.max_load_tokens < 0:
            raise ValueError("max_load_tokens is a number of tokens")


_NONE: Final = Wishes()
_NEITHER: Final = Wishes(store=False, load=False)


def wishes_of(params: Mapping[str, Any] | None) -> Wishes:
    """Read a request's transfer parameters."""
    if not params or KEY not in params:
        return _NONE
    try:
        return msgspec.convert(params[KEY], Wishes)
    except (msgspec.ValidationError, ValueError, TypeError):
        return _NEITHER
