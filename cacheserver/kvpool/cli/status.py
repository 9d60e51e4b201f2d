# SPDX-License-Identifier: Apache-2.0
"""`kvpool status`: what a server holds, and in words why it does not hit; or how an engine stands to its servers."""

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kvpool.cli.admin import clients_of, movers_of
from kvpool.cli.connect import Probe
from kvpool.cli.engine import EngineView, metrics_of, view_of
from kvpool.cli.errors import UsageError
from kvpool.cli.numbers import Numbers, numbers_of
from kvpool.cli.settings import client_config
from kvpool.cli.verdict import Verdict, judge
from kvpool.wire.messages import Statistics

__all__ = ["as_json", "as_text", "engine_as_text", "run"]

Table = list[dict[str, Any]]

ID_DIGITS: Final = 8
"""Digits of a client's id in the table, as in the server's log at debug; --json has all of them."""


def run(args: argparse.Namespace) -> int:
    """Ask the server, or the engine, and print; with --watch until Ctrl-C.

    Raises:
        Failure: it cannot be reached or refuses; the text says why and what to do.
        UsageError: options that do not go together.
    """
    if args.engine:
        if args.server or args.admin:
            raise UsageError("--engine: asks an engine alone; leave --server and --admin out")
        _repeat(lambda: _engine(args.engine, as_json=args.json), args.watch)
        return 0
    render = as_json if args.json else as_text
    with Probe(client_config(args)) as probe:

        def report() -> str:
            clients = clients_of(args.admin) if args.admin else None
            movers = movers_of(args.admin) if args.admin else None
            return render(probe.statistics(), clients, movers)

        _repeat(report, args.watch)
    return 0


def _repeat(report: Callable[[], str], every_s: float | None) -> None:
    """Show a report, once or until Ctrl-C."""
    pause = threading.Event()
    while True:
        _show(report(), clear=every_s is not None and sys.stdout.isatty())
        if every_s is None:
            return
        pause.wait(every_s)


def _engine(url: str, *, as_json: bool) -> str:
    view = view_of(metrics_of(url))
    if as_json:
        return msgspec.json.encode(msgspec.to_builtins(view) | {"hit_rate": view.hit_rate}).decode()
    return engine_as_text(url, view)


def engine_as_text(url: str, view: EngineView) -> str:
    """Return the report for people of how the engine at *url* stands."""
    n = view.numbers
    halves = [f"the {u['half']} of engine {u['engine'] or 0} runs uncached: {u['reason']}" for u in view.uncached]
    rows = [
        ("engine", url),
        ("cache", "; ".join(halves) or "in use"),
        ("hit rate", _rate(view.hit_rate, n["hit_tokens"], n["lookup_tokens"])),
        ("loads", f"{n['loads']} planned, {n['loads_in_flight']} in flight, {n['failed_loads']} failed"),
        ("stored", f"{n['stored_chunks']} chunks; {n['dropped_stores']} stores dropped"),
    ]
    return "\n".join([*_aligned(rows), *_table(list(view.servers), "no server yet")])


def as_json(s: Statistics, clients: Table | None = None, movers: Table | None = None) -> str:
    """Return everything as one JSON object: the server's numbers, what follows from them, the verdict."""
    n = numbers_of(s)
    verdict = judge(n)
    found: dict[str, Any] = {
        "statistics": msgspec.to_builtins(s),
        "hit_rate": n.hit_rate,
        "lookups": n.lookups,
        "stored_chunks": n.stored,
        "skipped_chunks": n.skipped,
        "verdict": {"kind": verdict.kind, "good": verdict.good, "text": verdict.text},
    }
    if clients is not None:
        found["clients"] = clients
    if movers is not None:
        found["movers"] = movers
    return msgspec.json.encode(found).decode()


def as_text(s: Statistics, clients: Table | None = None, movers: Table | None = None) -> str:
    """Return the report for people."""
    n = numbers_of(s)
    lines = _aligned(list(_rows(s, n, judge(n))))
    lines += _table(clients, "no clients") if clients is not None else ()
    lines += _table(movers, "no workers") if movers is not None else ()
    return "\n".join(lines)


def _rows(s: Statistics, n: Numbers, verdict: Verdict) -> Iterator[tuple[str, str]]:
    state = "draining" if s.draining else "ready" if s.ready else "starting"
    yield "server", f"{s.server_id}, kvpool {s.server_version}, {state}, up {_duration(s.uptime_s)}"
    yield "verdict", verdict.text
    used = f"{_size(s.l1_used_bytes)} of {_size(s.l1_bytes)} used ({s.l1_used_bytes / s.l1_bytes:.0%})"
    yield "L1", f"{used}, {_size(s.l1_pinned_bytes)} pinned"
    yield "chunks", f"{s.chunks} of {s.chunk_tokens} tokens, {n.evicted} evicted"
    yield "engines", f"{n.clients} connected, {s.sessions} requests"
    yield "leases", f"{s.leases}" + (f", oldest {_duration(s.oldest_lease_s)}" if s.leases else "")
    yield "hit rate", _rate(n.hit_rate, n.hit_tokens, n.lookup_tokens)
    yield "lookups", _counts(n.lookups)
    yield "stored", f"{n.stored} chunks, {n.present} were there already; skipped: {_counts(n.skipped)}"
    yield "loaded", _counts(n.loads)
    if n.mismatches:
        yield (
            "damaged",
            f"{n.mismatches} chunks had another checksum than when stored; suspect memory, see docs/operations.md",
        )
    if n.illegal_moves:
        yield "defects", f"{n.illegal_moves} moves that must not happen; please report them with the server's log"


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"{label.ljust(width)}  {text}" for label, text in rows]


def _rate(rate: float | None, hit_tokens: int, lookup_tokens: int) -> str:
    return "no lookup yet" if rate is None else f"{rate:.1%} ({hit_tokens} of {lookup_tokens} tokens)"


def _table(of: Table, none: str) -> Iterator[str]:
    yield ""
    if not of:
        yield none
        return
    names = list(of[0])
    rows = [names, *([_cell(name, row.get(name)) for name in names] for row in of)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(names))]
    yield from ("  ".join(t.ljust(w) for t, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def _cell(name: str, value: object) -> str:
    if value in (None, ""):
        return "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return _size(value)
    if name == "client_id":
        return str(value)[:ID_DIGITS]
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda i: -i[1])) or "none"


def _size(count: int) -> str:
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":  # noqa: PLR2004 - a unit's size
        value, unit = value / 1024, next(units)
    return f"{value:.4g} {unit}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    parts = [f"{v} {u}" for v, u in ((days, "d"), (h, "h"), (m, "min")) if v]
    return " ".join(parts[:2]) or (f"{seconds:.1f} s" if s < 10 else f"{s} s")  # noqa: PLR2004 - below, tenths matter


def _show(text: str, *, clear: bool) -> None:
    if clear:
        print("\x1b[H\x1b[J", end="")
    print(text, flush=True)
