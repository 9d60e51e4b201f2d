# SPDX-License-Identifier: Apache-2.0
"""The connector with a server for each rank, as ranks on different machines would have; runs in the engine."""

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpool.connector.facade import KVPoolConnector


class RankedConnector(KVPoolConnector):  # type: ignore[misc]
    """Takes ``servers`` in the extra configuration: one address for each rank."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = copy.copy(vllm_config)
        config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        extra = dict(config.kv_transfer_config.kv_connector_extra_config)
        servers = extra.pop("servers")
        extra["server"] = servers[0 if role is KVConnectorRole.SCHEDULER else vllm_config.parallel_config.rank]
        config.kv_transfer_config.kv_connector_extra_config = extra
        super().__init__(config, role, kv_cache_config)
