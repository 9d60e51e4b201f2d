# SPDX-License-Identifier: Apache-2.0
"""Every metric of a cache server, declared once: the exporter, the reference page and the tests read this list.

A series is named by its key, which is the text of the exposition format without the value:
``kvpool_lookups_total{reason="all"}``. The engine, the request loop and the ``Statistics`` reply all use these keys, so
one dictionary from key to number is the whole state. Label values come from closed sets; a client, a request, a key or
a model is never a label. Every series exists with 0 from the start.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final, get_args

from kvpool._version import __version__
from kvpool.metrics.metric import Kind, Metric
from kvpool.metrics.movers import MOVERS
from kvpool.model.errors import BY_CODE
from kvpool.model.identity import ClientKind, Mode
from kvpool.model.reasons import LookupReason
from kvpool.model.slots import Disposition
from kvpool.wire.messages import AnyRequest

__all__ = ["CATALOGUE", "Kind", "Metric", "all_series", "bucket_text", "find", "series", "series_key"]


_LATENCY_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
_STORE_ENDS: Final = (
    Disposition.STORED,
    Disposition.PRESENT,
    Disposition.PENDING,
    Disposition.FULL,
    Disposition.QUOTA,
    Disposition.PINNED,
    Disposition.ABANDONED,
)
_LOAD_ENDS: Final = (Disposition.VOUCHED, Disposition.LOST)
_UNKNOWN: Final = "unknown"
"""Request label of what does not decode."""


def _request_tags() -> tuple[str, ...]:
    tags = (str(cls.__struct_config__.tag) for cls in get_args(AnyRequest))
    return (*sorted(tags), _UNKNOWN)


def _names(members: tuple[Disposition, ...]) -> tuple[str, ...]:
    return tuple(m.name.lower() for m in members)


_LOOKUPS: Final = (
    Metric(
        name="kvpool_lookups_total",
        kind=Kind.COUNTER,
        unit="lookups",
        help="Lookups answered, by why the found prefix ends where it does; counted when the first answer is sent.",
        panel="Hit rate",
        labels=(("reason", tuple(r.value for r in LookupReason)),),
    ),
    Metric(
        name="kvpool_lookup_tokens_total",
        kind=Kind.COUNTER,
        unit="tokens",
        help="Tokens of full chunks that lookups asked for; counted when the first answer is sent.",
        panel="Hit rate",
    ),
    Metric(
        name="kvpool_hit_tokens_total",
        kind=Kind.COUNTER,
        unit="tokens",
        help="Tokens that lookups found and pinned, also those that arrived while the lookup waited.",
        panel="Hit rate",
    ),
)

_TRANSFERS: Final = (
    Metric(
        name="kvpool_load_chunks_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks that clients read, by the server's verdict when the read was committed.",
        panel="Transfers",
        labels=(("result", _names(_LOAD_ENDS)),),
    ),
    Metric(
        name="kvpool_store_chunks_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks that clients asked to store, by how each one ended.",
        panel="Transfers",
        labels=(("disposition", _names(_STORE_ENDS)),),
    ),
    Metric(
        name="kvpool_store_begun_chunks_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks that clients were told to send; each one later ends as stored or abandoned.",
        panel="Transfers",
    ),
    Metric(
        name="kvpool_store_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        help="Bytes of chunks that were kept, counted when they became visible to lookups.",
        panel="Transfers",
    ),
    Metric(
        name="kvpool_load_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        help="Bytes of chunks that the server vouched for when their read was committed.",
        panel="Transfers",
    ),
    Metric(
        name="kvpool_tier_fetches_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks asked from a lower tier, by whether they came, counted when the fetch ended.",
        panel="Transfers",
        labels=(("result", ("hit", "miss")),),
    ),
    Metric(
        name="kvpool_bulk_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        help="Bytes of chunks that travelled in frames, counted when the copy between frame and slot has ended.",
        panel="Transfers",
        labels=(("direction", ("in", "out")),),
    ),
    Metric(
        name="kvpool_checksum_mismatches_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks whose reader found another checksum than the writer's; each is a miss and is dropped.",
        panel="Transfers",
    ),
)

_MEMORY: Final = (
    Metric(
        name="kvpool_l1_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Size of the arena, as configured.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_l1_wanted_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="What kvpool_l1_bytes is on its way to, after a change of l1.size_bytes.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_l1_mapped_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Bytes that are not used any more since L1 was made smaller, and stay taken until clients let go of them.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_l1_used_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Bytes of slots that are not free, at the last tick of the loop.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_l1_pinned_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Bytes of slots that lookups hold, at the last tick of the loop.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_chunks",
        kind=Kind.GAUGE,
        unit="chunks",
        help="Shards of chunks that a lookup can find, at the last tick of the loop.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_evicted_chunks_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks dropped to make room, counted when their slot is taken out of the index.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_cleared_chunks_total",
        kind=Kind.COUNTER,
        unit="chunks",
        help="Shards of chunks dropped by Clear, counted when their slot is taken out of the index.",
        panel="Memory",
    ),
    Metric(
        name="kvpool_quarantined_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Bytes of slots that nobody may use until their writer is proven gone, at the last tick of the loop.",
        panel="Memory",
    ),
)

_CLIENTS: Final = (
    Metric(
        name="kvpool_clients",
        kind=Kind.GAUGE,
        unit="clients",
        help="Clients that have said Hello and are not gone, by what they do.",
        panel="Clients",
        labels=(("kind", tuple(k.value for k in ClientKind)),),
    ),
    Metric(
        name="kvpool_client_modes",
        kind=Kind.GAUGE,
        unit="clients",
        help="Registered workers by the transfer mode that was agreed.",
        panel="Clients",
        labels=(("mode", tuple(m.value for m in Mode)),),
    ),
    Metric(
        name="kvpool_sessions",
        kind=Kind.GAUGE,
        unit="requests",
        help="Engine requests that hold at least one lease or tombstone, at the last tick of the loop.",
        panel="Clients",
    ),
    Metric(
        name="kvpool_leases",
        kind=Kind.GAUGE,
        unit="leases",
        help="Lookups and stores under way, at the last tick of the loop.",
        panel="Clients",
    ),
    Metric(
        name="kvpool_oldest_lease_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Age of the oldest lease, from its grant to the last tick of the loop; 0 without leases.",
        panel="Clients",
    ),
    Metric(
        name="kvpool_expired_leases_total",
        kind=Kind.COUNTER,
        unit="leases",
        help="Leases that ran out before their owner ended them.",
        panel="Clients",
        labels=(("kind", ("lookup", "store")),),
    ),
    Metric(
        name="kvpool_dropped_clients_total",
        kind=Kind.COUNTER,
        unit="clients",
        help="Clients that ended without saying so, by how that was noticed.",
        panel="Clients",
        labels=(("cause", ("died", "silent", "replaced", "identity", "unread")),),
    ),
)

_LOOP: Final = (
    Metric(
        name="kvpool_requests_total",
        kind=Kind.COUNTER,
        unit="requests",
        help="Requests answered, by type and by what kind of answer was sent.",
        panel="Request loop",
        labels=(("request", _request_tags()), ("result", ("ok", "retryable", "refused", "internal"))),
    ),
    Metric(
        name="kvpool_errors_total",
        kind=Kind.COUNTER,
        unit="requests",
        help="Requests answered with an error, by its code.",
        panel="Request loop",
        labels=(("code", tuple(sorted(BY_CODE))),),
    ),
    Metric(
        name="kvpool_queue_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="Time a request waited in the loop, from the wake-up that received it to the start of its handler.",
        panel="Request loop",
        buckets=_LATENCY_S,
    ),
    Metric(
        name="kvpool_refused_frames_total",
        kind=Kind.COUNTER,
        unit="messages",
        help="Messages that could not be read, by what was wrong; those with a readable envelope were answered.",
        panel="Request loop",
        labels=(("reason", ("envelope", "body", "size", "frames")),),
    ),
    Metric(
        name="kvpool_loop_round_trip_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Time of the last question to the loop by another thread, from posting it to its answer.",
        panel="Request loop",
    ),
    Metric(
        name="kvpool_illegal_moves_total",
        kind=Kind.COUNTER,
        unit="moves",
        help="Moves of a slot that its state forbids. Always a defect of kvpool, never of a client.",
        panel="Request loop",
    ),
    Metric(
        name="kvpool_ready",
        kind=Kind.GAUGE,
        unit="boolean",
        help="1 from the end of recovery until the drain begins, else 0.",
        panel="Server",
    ),
    Metric(
        name="kvpool_draining",
        kind=Kind.GAUGE,
        unit="boolean",
        help="1 from the signal to stop until the exit, else 0.",
        panel="Server",
    ),
    Metric(
        name="kvpool_uptime_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Time from the start of the process to the last tick of the loop.",
        panel="Server",
    ),
    Metric(
        name="kvpool_build_info",
        kind=Kind.GAUGE,
        unit="boolean",
        help="Always 1; the label says which version runs.",
        panel="Server",
        labels=(("version", (__version__,)),),
    ),
)

CATALOGUE: Final = (*_LOOKUPS, *_TRANSFERS, *_MEMORY, *_CLIENTS, *MOVERS, *_LOOP)

_BY_NAME: Final = {m.name: m for m in CATALOGUE}


def find(name: str) -> Metric:
    """Return the metric called *name*.

    Raises:
        KeyError: the catalogue has none.
    """
    return _BY_NAME[name]


def series_key(name: str, **labels: str) -> str:
    """Return the key of one series: the metric's name, and its labels in the order of the catalogue."""
    if not labels:
        return name
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


def bucket_text(bound: float) -> str:
    """Return a bucket's bound as the ``le`` label shows it."""
    return "+Inf" if bound == float("inf") else f"{bound:g}"


def series(metric: Metric) -> Iterator[str]:
    """Yield the keys of all series of *metric*; a histogram's are its buckets, its sum and its count."""
    names = [name for name, _ in metric.labels]
    for values in product(*(values for _, values in metric.labels)):
        labels = dict(zip(names, values, strict=True))
        if metric.kind is not Kind.HISTOGRAM:
            yield series_key(metric.name, **labels)
            continue
        for bound in (*metric.buckets, float("inf")):
            yield series_key(f"{metric.name}_bucket", **labels, le=bucket_text(bound))
        yield series_key(f"{metric.name}_sum", **labels)
        yield series_key(f"{metric.name}_count", **labels)


def all_series() -> Iterator[str]:
    """Yield the keys of every series of the catalogue, in its order."""
    for metric in CATALOGUE:
        yield from series(metric)
