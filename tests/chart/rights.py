# SPDX-License-Identifier: Apache-2.0
"""The rights that the operator uses, read from its code: what it calls at the API server, and what kopf does for it.

A right is (group, resource, verb). Where a pool's namespace is concerned they are in POOL, for kinds without a
namespace in CLUSTER, in the operator's own namespace in OWN.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from kvpool_operator import cluster, handlers
from kvpool_operator.cluster import CHILDREN, HOOKS, LEASES, SECRETS, Kind

Right = tuple[str, str, str]

OPERATOR = Path(cluster.__file__).parent
WEBHOOK = OPERATOR / "admission"
"""The admission server's code: another process with another account."""
VERBS = {
    "apply": ("patch", "create"),  # an apply that makes the object is a create, too
    "create": ("create",),
    "delete": ("delete",),
    "get": ("get",),
    "list": ("list",),
    "each": ("list",),
    "replace": ("update",),
    "apply_bundle": ("patch",),
    "snapshot": ("list",),
    "watch": ("watch",),
}
"""Methods of Cluster that take a kind, or for apply a child."""
ELSEWHERE = {"apply_status", "evict", "kinds", "read"}
"""Methods whose rights are not of that shape: see IMPLIED; and reading what every account may."""

KINDS = [k for k in vars(cluster).values() if isinstance(k, Kind)] + list(CHILDREN.values())

IMPLIED: set[Right] = {
    ("kvpool.dev", "kvcachepools/status", "patch"),  # Cluster.apply_status
    # Children block the deletion of their owner; where the API server enforces who may do that, this is the right.
    ("kvpool.dev", "kvcachepools/finalizers", "update"),
    ("", "pods/eviction", "create"),  # Cluster.evict
}


def group(kind: Kind) -> str:
    return kind.api_version.rpartition("/")[0]


def right(kind: Kind, verb: str) -> Right:
    return group(kind), kind.plural, verb


def calls(*, webhook: bool = False) -> Iterator[tuple[str, tuple[Kind, ...]]]:
    """Each call of a method of Cluster in the operator's code, with the kinds that it may be about."""
    for file in sorted(OPERATOR.rglob("*.py")):
        if file.name == "cluster.py" or file.is_relative_to(WEBHOOK) is not webhook:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_cluster(node.func.value):
                yield node.func.attr, _kinds(node) if node.func.attr in VERBS else ()


def _is_cluster(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("cluster", "_cluster")


def _kinds(call: ast.Call) -> tuple[Kind, ...]:
    """Kinds that the first argument names; all children where it is one of them that only the run decides."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "apply_bundle":
        return (HOOKS,)
    match call.args[0] if call.args else None:
        case ast.Name(id=name) if name.isupper():
            return (getattr(cluster, name),)
        case ast.Subscript(value=ast.Name(id="CHILDREN"), slice=ast.Constant(value=str(name))):
            return (CHILDREN[name],)
        case _:
            return tuple(CHILDREN.values())


def watched() -> Iterator[Kind]:
    """Kinds that kopf lists and watches: those of the decorators in handlers.py."""
    for node in ast.walk(ast.parse(Path(handlers.__file__).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kopf.on.event":
            parts = tuple(_parts(node.args))
            (found,) = (k for k in KINDS if (*k.api_version.split("/"), k.plural) == parts)
            yield found


def _parts(arguments: list[ast.expr]) -> Iterator[str]:
    """Group, version and plural, also where a constant of the module holds them."""
    for argument in arguments:
        match argument:
            case ast.Constant(value=str(part)):
                yield part
            case ast.Starred(value=ast.Name(id=name)):
                yield from getattr(handlers, name)
            case _:
                raise TypeError(f"{ast.unparse(argument)}: not a literal; teach this function to read it")


def used() -> set[tuple[Kind, str]]:
    """Kind and verb of everything that the operator does."""
    found = {(k, verb) for method, kinds in calls() for k in kinds for verb in VERBS[method]}
    return found | {(k, verb) for k in watched() for verb in ("list", "watch")}


def pool_rights() -> set[Right]:
    return IMPLIED | {right(k, v) for k, v in used() if k.namespaced and k is not LEASES}


def cluster_rights() -> set[Right]:
    return {right(k, v) for k, v in used() if not k.namespaced}


def own_rights() -> set[Right]:
    return {right(k, v) for k, v in used() if k is LEASES}


def webhook_rights() -> tuple[set[Right], set[Right], set[Right]]:
    """Rights of the admission server: where pools are, on the hooks by their name, in its own namespace."""
    found = {(k, verb) for method, kinds in calls(webhook=True) for k in kinds for verb in VERBS[method]}
    own = {right(k, v) for k, v in found if k is SECRETS}
    hooks = {right(k, v) for k, v in found if k is HOOKS}
    return {right(k, v) for k, v in found if k.namespaced} - own, hooks, own
