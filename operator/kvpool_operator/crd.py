# SPDX-License-Identifier: Apache-2.0
"""The spec's types as a CustomResourceDefinition: structural schema, defaults, CEL rules, columns.

``python -m kvpool_operator.crd PATH`` writes it to PATH, without an argument to standard output.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec import NODEFAULT, inspect

from kvpool_operator.spec.pool import Pool, PoolSpec
from kvpool_operator.spec.quantity import DURATION_PATTERN, QUANTITY_PATTERN, Duration, Size
from kvpool_operator.spec.report import PoolStatus
from kvpool_operator.spec.schema_types import Rule

__all__ = ["GROUP", "KIND", "PLURAL", "VERSION", "crd", "main", "render", "schema"]

GROUP: Final = "kvpool.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "KVCachePool"
PLURAL: Final = "kvcachepools"

_COLUMNS: Final = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Servers", "string", ".status.servers.summary", 0),
    ("Used", "string", ".status.used", 0),
    ("Capacity", "string", ".status.capacity", 0),
    ("Hit rate", "string", ".status.hitRate", 0),
    ("Clients", "integer", ".status.clients", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("GPU mode", "string", ".status.gpuMode", 1),
)

_OPAQUE: Final = {
    Size: {"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 32},
    Duration: {"type": "string", "pattern": DURATION_PATTERN, "maxLength": 16},
}


def crd() -> dict[str, Any]:
    """The whole CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["kvp"],
                "categories": ["kvcache"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(*c) for c in _COLUMNS],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "A pool of node-local KV cache servers.",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": schema(PoolSpec),
                    "status": _without_defaults(schema(PoolStatus)),
                },
                "x-kubernetes-validations": [_validation(r) for r in Pool.rules],
            }
        },
    }


def _without_defaults(node: Any) -> Any:
    """A status says what was seen; nothing is filled in."""
    if isinstance(node, dict):
        return {k: _without_defaults(v) for k, v in node.items() if k != "default"}
    return node


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def schema(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """The structural schema of *cls*: no references, no titles, nothing that a CRD may not hold."""
    return _node(inspect.type_info(cls))


def _node(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=more, extra=extra):
            return {**_described(more), **_node_with(inner, extra or {})}
        case inspect.UnionType(types=types):
            return _node(_only(types))
        case inspect.StructType():
            return _object(kind)
        case inspect.CustomType(cls=cls):
            return dict(_OPAQUE[cls])
        case _:
            return _list_or_map(kind)


def _list_or_map(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.DictType(value_type=value, max_length=longest):
            return _bounded("object", maxProperties=longest) | {"additionalProperties": _node(value)}
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return _bounded("array", minItems=least, maxItems=most) | {"items": _node(item)}
        case _:
            return _scalar(kind)


def _scalar(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
            return _bounded("string", minLength=least, maxLength=most, pattern=pattern)
        case inspect.IntType(ge=least, le=most):
            return _bounded("integer", format="int64", minimum=least, maximum=most)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case inspect.EnumType(cls=cls):
            return {"type": "string", "enum": [m.value for m in cls]}
    raise TypeError(f"{kind} has no place in a structural schema")


def _node_with(inner: inspect.Type, extra: dict[str, Any]) -> dict[str, Any]:
    """*inner* with what JSON schema cannot say: list types, formats, int-or-string."""
    if extra.get("int_or_string"):
        return {"x-kubernetes-int-or-string": True, "maxLength": 32}
    node = _node(inner)
    if keys := extra.get("map_keys"):
        node |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
    if extra.get("set"):
        node["x-kubernetes-list-type"] = "set"
    if text_format := extra.get("format"):
        node["format"] = text_format
    return node


def _object(kind: inspect.StructType) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "object"}
    if description := _first_line(kind.cls):
        node["description"] = description
    node["properties"] = {f.encode_name: _field(f) for f in kind.fields}
    if required := [f.encode_name for f in kind.fields if f.required]:
        node["required"] = required
    if rules := getattr(kind.cls, "rules", ()):
        node["x-kubernetes-validations"] = [_validation(r) for r in rules]
    return node


def _field(field: inspect.Field) -> dict[str, Any]:
    node = _node(field.type)
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    if default is NODEFAULT or default is None:
        return node
    return {**node, "default": _plain(default)}


def _plain(value: Any) -> Any:
    """A default as the user would write it, whole: rules are tried on it before inner defaults fill it."""
    match value:
        case msgspec.Struct():
            fields = ((f.encode_name, getattr(value, f.name)) for f in msgspec.structs.fields(value))
            return {name: _plain(inner) for name, inner in fields if inner is not None}
        case Duration():
            return f"{int(value)}s"
        case Enum():
            return value.value
        case tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _validation(rule: Rule) -> dict[str, Any]:
    return {"rule": rule.rule, "message": rule.message} | ({"fieldPath": rule.field} if rule.field else {})


def _only(types: tuple[inspect.Type, ...]) -> inspect.Type:
    kinds = [t for t in types if not isinstance(t, inspect.NoneType)]
    if len(kinds) != 1:
        raise TypeError(f"{types}: a structural schema knows one type for each field")
    return kinds[0]


def _bounded(kind: str, **bounds: Any) -> dict[str, Any]:
    return {"type": kind} | {name: value for name, value in bounds.items() if value is not None}


def _described(more: dict[str, Any] | None) -> dict[str, Any]:
    return {"description": more["description"]} if more and "description" in more else {}


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""


class _Dumper(yaml.SafeDumper):
    """Writes lists indented and nothing as an alias."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)


def render() -> str:
    """The CRD as YAML."""
    text = yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated by `python -m kvpool_operator.crd`; do not edit.\n{text}"


def main(arguments: list[str]) -> None:
    """Write the CRD to the file named, or to standard output."""
    if arguments:
        Path(arguments[0]).write_text(render())
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main(sys.argv[1:])
