# SPDX-License-Identifier: Apache-2.0
"""The golden cases of the builders: a pool as a user writes it, and everything that follows from it.

``python -m tests.unit.operator.cases`` writes the manifests anew; review the difference.
"""

from pathlib import Path
from typing import Any

import yaml

from kvpool_operator.desired import Facts, key_secret, manifests
from kvpool_operator.spec import Pool, parse_pool

FOLDER = Path(__file__).parents[2] / "golden" / "operator"
CASES = sorted(p.parent for p in FOLDER.glob("*/pool.yaml"))

PUBLIC_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
PRIVATE_KEY = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
"""The pair of the ZeroMQ documentation: known to everybody, protects nothing."""

JWKS = '{"keys":[]}'


def facts(**changes: Any) -> Facts:
    """Surroundings in which every kind exists."""
    known = {
        "image": "kvpool.example/server:test",
        "operator_namespace": "kvpool-system",
        "server_key": PUBLIC_KEY,
        "issuer": "https://kubernetes.default.svc",
        "issuer_keys": JWKS,
        "priority_class": "kvpool-server",
        "runtime_classes": frozenset({"nvidia"}),
        "monitoring_kinds": frozenset({"PodMonitor", "PrometheusRule"}),
        "servers": "tcp://192.0.2.11:7410#node-1\n",
        "node_pools": ("11111111-1111-4111-8111-111111111111",),
    }
    return Facts(**(known | changes))


def raw_pool(case: Path) -> dict[str, Any]:
    """The custom resource of *case*."""
    body: dict[str, Any] = yaml.safe_load((case / "pool.yaml").read_text())
    return body


def pool_of(case: Path) -> Pool:
    """The case's pool with the identity that an API server would give it."""
    return parse_pool(with_identity(raw_pool(case)))


def with_identity(body: dict[str, Any], namespace: str = "models") -> dict[str, Any]:
    """*body* as if it had been stored."""
    identity = {"namespace": namespace, "uid": "11111111-1111-4111-8111-111111111111", "generation": 1}
    return {**body, "metadata": {**identity, **body["metadata"]}}


def everything(case: Path) -> list[dict[str, Any]]:
    """All objects of *case*, its Secret first."""
    pool = pool_of(case)
    return [key_secret(pool, PUBLIC_KEY, PRIVATE_KEY), *manifests(pool, facts())]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def write() -> None:
    """Write every case's manifests."""
    for case in CASES:
        text = yaml.dump_all(everything(case), Dumper=_Dumper, sort_keys=False, width=120)
        (case / "manifests.yaml").write_text(text)


if __name__ == "__main__":
    write()
