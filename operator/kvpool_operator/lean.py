# SPDX-License-Identifier: Apache-2.0
"""Pure: pages of pods and nodes, of which only what the operator looks at is ever made into objects.

Who wrote which field, and what runs in a pod, is most of such a page; passing over it takes a tenth of the time.
"""

from typing import Any, Final

from msgspec import Struct, field, json, to_builtins

__all__ = ["Page", "page", "raw"]


class _Metadata(Struct, rename="camel", omit_defaults=True):
    name: str
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[Any] = []
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class _Spec(Struct, rename="camel", omit_defaults=True):
    node_name: str = ""
    affinity: dict[str, Any] = {}


class _Object(Struct, omit_defaults=True):
    metadata: _Metadata
    spec: _Spec = field(default_factory=_Spec)
    status: dict[str, Any] = {}


class _ListMetadata(Struct):
    following: str = field(default="", name="continue")


class Page(Struct):
    """One answer of a list."""

    metadata: _ListMetadata = field(default_factory=_ListMetadata)
    items: list[_Object] | None = None

    @property
    def following(self) -> str:
        """What to ask for the page after it with; empty after the last one."""
        return self.metadata.following


_DECODER: Final = json.Decoder(Page)


def page(text: str) -> Page:
    """Read *text*, an answer of the API server.

    Raises:
        ValueError: it is no list of objects.
    """
    return _DECODER.decode(text)


def raw(found: _Object) -> dict[str, Any]:
    """*found* as the API server shows it, without what nobody looks at and without what is empty."""
    made: dict[str, Any] = to_builtins(found)
    return {"spec": {}, "status": {}} | made
