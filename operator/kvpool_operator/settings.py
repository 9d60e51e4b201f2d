# SPDX-License-Identifier: Apache-2.0
"""How this operator process runs; read once from the environment, handed on as one value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Settings", "fields_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One value for everything that is not in a pool."""

    namespace: str = "kvpool-system"
    """Namespace that the operator runs in; its Lease is there."""
    identity: str = "kvpool-operator"
    """Name of this replica."""
    lease: str = "kvpool-operator"
    """Name of the Lease: replicas of one installation share it, others in the same namespace do not."""
    server_image: str = "kvpool-server"
    priority_class: str | None = None
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces with pools; empty: all."""
    stats_url: str = "http://{ip}:{port}/status"
    """Where a server's statistics are."""
    stats_s: float = 30.0
    """Time between two looks at the servers' statistics."""
    resync_s: float = 300.0
    """Time after which every pool is looked at again, whatever the watches said."""
    status_gap_s: float = 5.0
    """Least time between two writes of one pool's status."""
    parallel: int = 4
    """Pools worked on at a time."""
    lease_s: float = 15.0
    http_host: str = "127.0.0.1"
    """Address of probes and metrics; in a pod its own, which is where the kubelet and Prometheus come from."""
    health_port: int = 8080
    """Port of probes and metrics."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Settings from variables named ``KVPOOL_OPERATOR_<FIELD>``.

        Raises:
            ValueError: a number is none.
        """
        return cls(**fields_from(cls, "KVPOOL_OPERATOR_", environ))


def fields_from(cls: Any, prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of the dataclass *cls* that variables named *prefix* and field give.

    Raises:
        ValueError: a number is none; the text names the variable.
    """
    known = {name: f"{prefix}{name.upper()}" for name in cls.__dataclass_fields__}
    return {
        name: _value(cls.__dataclass_fields__[name].default, variable, environ[variable])
        for name, variable in known.items()
        if environ.get(variable)
    }


def _value(default: object, variable: str, text: str) -> object:
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError as e:
            raise ValueError(f"{variable}: {text!r} is no number") from e
    return text
