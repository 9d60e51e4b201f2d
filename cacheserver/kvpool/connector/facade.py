# SPDX-License-Identifier: Apache-2.0
"""The only door to vLLM: translates its calls for the two halves.

    --kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool.connector.facade",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"server": "ipc:///run/kvpool/kvpool.sock"}}'

The extra configuration holds the fields of ``kvpool.config.ClientConfig``, flat; ``KVPOOL_CLIENT__...`` in the
environment overrides them. A wrong setting stops the engine's start with its name. Everything else that goes wrong,
here or at the server, leaves the engine running uncached, with one line that says why.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes

from kvpool.connector import statistics
from kvpool.connector.halves import SchedulerHalf, WorkerHalf
from kvpool.connector.plan import StepPlan, decode, encode
from kvpool.connector.scheduler import Step
from kvpool.connector.translate import NotCacheable, client_config, engine_facts

__all__ = ["KVPoolConnector", "KVPoolHandshake", "KVPoolMetadata", "KVPoolPrometheus", "KVPoolStats"]

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _HIT_SOURCE = CacheHitSource.HOST
except ImportError:  # vLLM before 0.32 counts all hits of connectors in one place
    _HIT_SOURCE = None

log = logging.getLogger("kvpool.connector")


class KVPoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's ``StepPlan`` as bytes."""

    def __init__(self, plan: bytes) -> None:
        self.plan = plan


class KVPoolHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """One worker's ``WorkerFacts`` as bytes."""

    def __init__(self, facts: bytes) -> None:
        self.facts = facts


class KVPoolStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted; see ``kvpool.connector.statistics``."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> "KVPoolStats":
        """Add another rank's or step's numbers."""
        return KVPoolStats(data=statistics.merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of the engine's log line."""
        return statistics.reduce(self.data)

    def is_empty(self) -> bool:
        """True if nothing happened."""
        return statistics.is_empty(self.data)


class KVPoolPrometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """The connector's series on the engine's metrics page."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._rows: dict[str, Any] = {}
        for key, row in statistics.COUNTERS.items():
            self._rows[key] = self._counter_cls(f"vllm:{row.name}", row.help, labelnames)
        for key, row in statistics.GAUGES.items():
            self._rows[key] = self._gauge_cls(f"vllm:{row.name}", row.help, labelnames, multiprocess_mode="mostrecent")
        row = statistics.UNCACHED
        self._uncached = self._gauge_cls(
            f"vllm:{row.name}", row.help, [*labelnames, "half", "reason"], multiprocess_mode="mostrecent"
        )
        row = statistics.SERVER
        self._server = self._gauge_cls(
            f"vllm:{row.name}", row.help, [*labelnames, "server", "state"], multiprocess_mode="mostrecent"
        )
        for values in per_engine_labelvalues.values():
            for metric in self._rows.values():
                metric.labels(*values)
            for half in statistics.HALVES:
                for reason in statistics.REASONS:
                    self._uncached.labels(*values, half, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's numbers."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, increase in transfer_stats_data.get("counters", {}).items():
            self._rows[key].labels(*values).inc(increase)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            kind, _, rest = key.partition(":")
            if key in self._rows:
                self._rows[key].labels(*values).set(value)
            elif kind == "server":
                address, _, state = rest.rpartition(":")
                self._server.labels(*values, address, state).set(value)
            else:
                self._uncached.labels(*values, *rest.split(":")).set(value)


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV cache of prompts in the node's cache server.

    Models with several cache groups are supported (``translate`` says which kinds); others run uncached.
    """

    _cache_hit_source = _HIT_SOURCE

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = client_config(transfer.kv_connector_extra_config, transfer.kv_role, os.environ)
        _share_handlers()
        self._scheduler = self._worker = None
        if role is KVConnectorRole.SCHEDULER:
            events = vllm_config.kv_events_config
            watches = events is not None and events.enable_kv_cache_events
            self._scheduler = SchedulerHalf(config, config.node or _machine(), watches=watches)
            if transfer.kv_load_failure_policy != "recompute":
                log.warning("kvpool: set kv_load_failure_policy to recompute, or a failed load ends its request")
        else:
            self._worker = WorkerHalf(config, config.node or _machine())
        self._plan = StepPlan()

    # --- class level -----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped is a miss later, nothing more."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPoolStats:
        """Make statistics from what came over the process boundary."""
        return KVPoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPoolPrometheus:
        """Make the series of the metrics page."""
        return KVPoolPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take over the engine's cache tensors."""
        worker = self._half_of_worker()
        _request_matrix_unit()
        try:
            _, hash_tokens = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)
            facts = engine_facts(
                self._vllm_config, self._kv_cache_config, hash_tokens=hash_tokens, fingerprints=_fingerprints()
            )
            worker.register(facts, kv_caches, _packing(self._vllm_config, kv_caches))
        except NotCacheable as e:
            worker.refuse(str(e))
        except Exception:
            log.exception("kvpool: the engine's configuration could not be read; the engine runs uncached")
            worker.refuse("the engine's configuration could not be read; see the log")

    def get_handshake_metadata(self) -> KVPoolHandshake:
        """Return what this worker caches."""
        return KVPoolHandshake(encode(self._half_of_worker().facts))

    def handle_preemptions(self, kv_connector_metadata: KVPoolMetadata) -> None:
        """End all reading of blocks that this step may overwrite."""
        self._plan = decode(kv_connector_metadata.plan, StepPlan)
        self._half_of_worker().preempt(self._plan)

    def bind_connector_metadata(self, connector_metadata: KVPoolMetadata) -> None:
        """Take the step's plan and ask where its stores go."""
        super().bind_connector_metadata(connector_metadata)
        self._plan = decode(connector_metadata.plan, StepPlan)
        self._half_of_worker().begin(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Start the step's loads; all are asynchronous."""
        self._half_of_worker().load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are gathered whole, after the step."""

    def wait_for_save(self) -> None:
        """The step's blocks are final. vLLM also calls it on the way out of a step that failed."""
        self._half_of_worker().saved(ran=sys.exc_info()[0] is None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return requests whose blocks may go and requests whose loads ended, each once.

        Which finished requests' blocks the engine holds is told by the plan, not by *finished_req_ids*.
        """
        sent, loaded = self._half_of_worker().results(self._plan)
        return sent or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what ``get_finished`` does, and requests whose loads failed, where the engine takes no blocks."""
        sent, loaded = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sent or set(),
            finished_recving=loaded or set(),
            failed_recving=self._half_of_worker().failed_requests(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks without valid data, in the same step as the end of their load."""
        return self._half_of_worker().bad_blocks()

    # --- scheduler -------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVPoolHandshake]) -> None:
        """Learn what the workers cache, and connect."""
        self._half_of_scheduler().attach([metadata[rank].facts for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        """Begin its lookup."""
        self._half_of_scheduler().arrived(request, monotonic())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return tokens beyond *num_computed_tokens* that can be loaded; None while the answer is pending."""
        return self._half_of_scheduler().matched(request, num_computed_tokens, monotonic())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load, now that there are blocks for it."""
        self._half_of_scheduler().allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVPoolMetadata:
        """Return the step's plan."""
        return KVPoolMetadata(encode(self._half_of_scheduler().plan(_step(scheduler_output))))

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear from the workers."""
        self._half_of_scheduler().received(
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
            connector_output.failed_recving or (),
        )

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002 - vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the engine must hold the request's blocks a little longer, and what its answer tells of it."""
        half = self._half_of_scheduler()
        outcome = half.outcome(request.request_id)
        return half.finished(request.request_id), outcome

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids)

    def take_events(self) -> list[Any]:
        """Return what came and went at the server, as the engine's own cache events: a chunk is one large block."""
        change, chunk_tokens = self._half_of_scheduler().events()
        events: list[Any] = []
        if change.removed:
            events.append(BlockRemoved([maybe_convert_block_hash(d) for d in change.removed], medium=MEDIUM_CPU))
        if change.stored:
            events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(d) for d in change.stored],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=chunk_tokens,
                    lora_id=None,
                    lora_name=None,
                    medium=MEDIUM_CPU,
                )
            )
        return events

    def reset_cache(self) -> bool:
        """Drop all that the servers keep of this engine's model; False if one of them did not say so."""
        return self._half_of_scheduler().reset()

    # --- both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVPoolStats | None:
        """Return what was counted since the last step; None if nothing."""
        half = self._scheduler or self._half_of_worker()
        stats = KVPoolStats(data=half.sample())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Say goodbye to the server; bounded."""
        (self._scheduler or self._half_of_worker()).close()

    def _half_of_worker(self) -> WorkerHalf:
        assert self._worker is not None, "a worker's call on the scheduler's connector"
        return self._worker

    def _half_of_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's call on a worker's connector"
        return self._scheduler


def _step(output: Any) -> Step:
    computed = [(r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    state = output.kv_connector_block_state
    return Step(
        scheduled=[(request_id, before + output.num_scheduled_tokens[request_id]) for request_id, before in computed],
        blocks_of=state.get_block_ids,
        preempted=output.preempted_req_ids or (),
        idle=output.total_num_scheduled_tokens == 0,
        states=state.boundary_state_offloads,
        tokens=output.total_num_scheduled_tokens,
    )


def _packing(vllm_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, str]:
    """Say for each layer what decides how its kernel arranges a block's bytes."""
    layers = vllm_config.compilation_config.static_forward_context
    layout = vllm_config.cache_config.kv_cache_layout
    return {
        name: " ".join(
            (
                f"vllm-{vllm.__version__}",
                type(getattr(layers.get(name), "impl", None)).__name__,
                f"isa={getattr(layers.get(name), 'isa', '')}",
                f"{tensor.dtype}{tuple(tensor.shape[1:])}/{tuple(tensor.stride()[1:])}",
                f"layout={layout}",
            )
        )
        for name, tensor in kv_caches.items()
    }


def _request_matrix_unit() -> None:
    """Ask the kernel for the matrix unit now: a first model step of one or two tokens uses it before the engine asks.

    A nearly full hit makes such a step, and the worker would die of an illegal instruction.
    """
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # noqa: SLF001 - the only way to it


def _machine() -> str:
    """Identity of the running machine, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _fingerprints() -> Path:
    """Folder that remembers digests of weight files."""
    return Path(os.environ.get("KVPOOL_CACHE") or Path.home() / ".cache" / "kvpool") / "fingerprints"


def _share_handlers() -> None:
    """Write the connector's lines where the engine's go; it configures no others."""
    ours, theirs = logging.getLogger("kvpool"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
