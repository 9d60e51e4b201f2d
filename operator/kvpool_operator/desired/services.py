# SPDX-License-Identifier: Apache-2.0
"""The two Services: one leads to the server of the caller's own node, one lists all servers."""

from typing import Any

from kvpool_operator.desired import names
from kvpool_operator.desired.config_map import mover_ports, serves_tcp
from kvpool_operator.spec.pool import Pool

__all__ = ["ports", "services"]


def ports(pool: Pool) -> dict[str, int]:
    """Ports of a server by name."""
    network = pool.spec.network
    found = {"operations": network.operations_port}
    if serves_tcp(pool):
        found["cache"] = network.port
        if network.encryption == "Control":
            found["bulk"] = network.bulk_port
    return found


def services(pool: Pool) -> list[dict[str, Any]]:
    """The Services that make sense; a pool whose only door is the socket has nothing for the node-local one."""
    headless = _service(pool, names.servers_service(pool), ports(pool), {"clusterIP": "None"})
    if not serves_tcp(pool):
        return [headless]
    data_ports = {name: port for name, port in ports(pool).items() if name != "operations"}
    # Strictly local: an address of another node would be wrong, since memory is shared within a node.
    local = _service(pool, names.node_service(pool), data_ports, {"internalTrafficPolicy": "Local"})
    local["spec"]["ports"] += [
        {"name": f"mover-{number}", "port": port, "targetPort": port, "protocol": "TCP"}
        for number, port in enumerate(mover_ports(pool))
    ]
    return [local, headless]


def _service(pool: Pool, name: str, wanted: dict[str, int], more: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(pool, name),
        "spec": {
            **more,
            "ipFamilyPolicy": "PreferDualStack",
            "selector": names.selector_labels(pool),
            "ports": [
                {"name": n, "port": port, "targetPort": n, "protocol": "TCP"} for n, port in sorted(wanted.items())
            ],
        },
    }
