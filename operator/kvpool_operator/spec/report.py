# SPDX-License-Identifier: Apache-2.0
"""The status of a KVCachePool, declared once; status.py fills it. No field holds the current time."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = [
    "MAX_PROBLEM_NODES",
    "MAX_UNWIRED_PODS",
    "MAX_VERSIONS",
    "Condition",
    "PoolStatus",
    "ProblemNode",
    "Rollout",
    "Servers",
    "Traffic",
    "UnwiredPod",
]

MAX_PROBLEM_NODES = 10
MAX_UNWIRED_PODS = 10
MAX_VERSIONS = 8


class _Part(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the status' parts."""


class Condition(_Part, frozen=True, kw_only=True):
    """One statement about the pool."""

    type: Annotated[str, Meta(max_length=64)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Z][A-Za-z0-9]*$")]
    message: Annotated[str, Meta(max_length=1024)]
    observed_generation: int
    last_transition_time: Annotated[str, Meta(max_length=32, extra={"format": "date-time"})]


class Servers(_Part, frozen=True, kw_only=True):
    """Counts of servers."""

    desired: int
    ready: int
    updated: int
    unreachable: int = 0
    """Servers on nodes that the cluster has lost sight of."""
    summary: Annotated[str, Meta(max_length=32, description="Ready of desired, for the table.")]


class Traffic(_Part, frozen=True, kw_only=True):
    """Sums over servers within a window."""

    window_seconds: int
    lookups: int
    prompt_tokens: int
    hit_tokens: int
    stored_chunks: int


class ProblemNode(_Part, frozen=True, kw_only=True):
    """A node whose server is not as it should be."""

    node: Annotated[str, Meta(max_length=253)]
    reason: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=256)] = ""


class UnwiredPod(_Part, frozen=True, kw_only=True):
    """A pod that opted in and is not wired."""

    namespace: Annotated[str, Meta(max_length=63)]
    name: Annotated[str, Meta(max_length=253)]
    reason: Annotated[str, Meta(max_length=64)]


class Rollout(_Part, frozen=True, kw_only=True):
    """Where a Paced update stands."""

    state: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=512)] = ""


class PoolStatus(_Part, frozen=True, kw_only=True):
    """What a pool is."""

    observed_generation: int = 0
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=16, extra={"map_keys": ("type",)})] = ()
    servers: Servers | None = None
    capacity: Annotated[str, Meta(max_length=32, description="Host memory of all ready servers.")] = ""
    used: Annotated[str, Meta(max_length=32, description="Of it in use.")] = ""
    hit_rate: Annotated[str, Meta(max_length=8, description="Hit tokens of prompt tokens within the window.")] = ""
    traffic: Traffic | None = None
    clients: Annotated[int | None, Meta(description="Connected clients, all servers together.")] = None
    gpu_mode: Annotated[str, Meta(max_length=32, description="GPU access in use.")] = ""
    versions: Annotated[dict[str, int], Meta(max_length=8, description="Servers by version.")] = {}
    rollout: Rollout | None = None
    server_key: Annotated[
        str, Meta(max_length=64, description="Public key of the servers, for clients in other namespaces.")
    ] = ""
    unwired_pod_count: int = 0
    unwired_pods: Annotated[tuple[UnwiredPod, ...], Meta(max_length=10, description="At most ten of them.")] = ()
    refused_pod_count: Annotated[
        int,
        Meta(description="Pods that name the pool from namespaces that it does not admit; they count nowhere else."),
    ] = 0
    problem_node_count: int = 0
    problem_nodes: Annotated[tuple[ProblemNode, ...], Meta(max_length=10, description="At most ten of them.")] = ()
