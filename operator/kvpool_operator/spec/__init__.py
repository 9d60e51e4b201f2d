# SPDX-License-Identifier: Apache-2.0
"""The pool's types, and the only reader of raw custom resources."""

from kvpool_operator.spec.parse import dump, parse_pool, parse_status
from kvpool_operator.spec.pool import GpuMode, IpcMode, Pool, PoolSpec, Strategy
from kvpool_operator.spec.report import Condition, PoolStatus, ProblemNode, Rollout, Servers, Traffic

__all__ = [
    "Condition",
    "GpuMode",
    "IpcMode",
    "Pool",
    "PoolSpec",
    "PoolStatus",
    "ProblemNode",
    "Rollout",
    "Servers",
    "Strategy",
    "Traffic",
    "dump",
    "parse_pool",
    "parse_status",
]
