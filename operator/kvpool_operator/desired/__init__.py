# SPDX-License-Identifier: Apache-2.0
"""Pure builders: a Pool and its surroundings in, manifests out. No clock, no environment, no input or output."""

from typing import Any

from kvpool_operator.desired import config_map, gpu, monitors, names
from kvpool_operator.desired.daemon_set import daemon_set
from kvpool_operator.desired.facts import Facts, Provision
from kvpool_operator.desired.network_policy import network_policy
from kvpool_operator.desired.secret import key_secret
from kvpool_operator.desired.services import services
from kvpool_operator.spec.pool import GpuMode, Pool

__all__ = ["Facts", "Provision", "key_secret", "manifests", "names"]


def manifests(pool: Pool, facts: Facts) -> list[dict[str, Any]]:
    """All objects that *pool* should own but its Secret, in the order to apply them: what is mounted comes first."""
    made = [config_map.client_config_map(pool, facts), config_map.server_config_map(pool, facts), *services(pool)]
    if pool.spec.network.policy:
        made.append(network_policy(pool, facts))
    if gpu.mode_in_use(pool, facts) is GpuMode.DRA:
        made.append(gpu.claim_template(pool))
    return [*made, daemon_set(pool, facts), *monitors.monitors(pool, facts)]
