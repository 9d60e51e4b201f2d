# SPDX-License-Identifier: Apache-2.0
"""What the spec's types are made of: sections, rules, and short names for bounded texts."""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

__all__ = ["KubeName", "LabelKey", "LabelValue", "Rule", "Section", "Word"]


class Rule(Struct, frozen=True):
    """One validation rule in CEL, evaluated by the API server on the section that declares it."""

    rule: str
    message: str
    field: str = ""
    """Path of the field at fault, from the section, such as ``.size``."""


class Section(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=False):
    """Base of all sections. Unknown fields are let through: the object may come from a newer schema."""

    rules: ClassVar[tuple[Rule, ...]] = ()


_LABEL_VALUE: Final = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_NAME: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

KubeName = Annotated[str, Meta(min_length=1, max_length=63, pattern=_NAME)]
"""Name of a namespace, a Secret, a class."""

LabelKey = Annotated[str, Meta(min_length=1, max_length=317)]
LabelValue = Annotated[str, Meta(max_length=63, pattern=_LABEL_VALUE)]
Word = Annotated[str, Meta(max_length=512)]
"""Any short text."""
