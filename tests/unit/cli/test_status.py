# SPDX-License-Identifier: Apache-2.0
"""What `kvpool status` makes of a server's statistics."""

import json
from typing import Any

from kvpool.cli import numbers as names
from kvpool.cli.numbers import by_label, numbers_of, total
from kvpool.cli.status import as_json, as_text
from kvpool.metrics.catalogue import find
from kvpool.wire.messages import Statistics

COUNTERS = {
    'kvpool_clients{kind="worker"}': 2.0,
    'kvpool_clients{kind="scheduler"}': 1.0,
    'kvpool_clients{kind="probe"}': 1.0,
    'kvpool_lookups_total{reason="all"}': 3.0,
    'kvpool_lookups_total{reason="missing"}': 1.0,
    'kvpool_lookups_total{reason="short"}': 0.0,
    "kvpool_lookup_tokens_total": 4096.0,
    "kvpool_hit_tokens_total": 3072.0,
    'kvpool_store_chunks_total{disposition="stored"}': 16.0,
    'kvpool_store_chunks_total{disposition="present"}': 4.0,
    'kvpool_store_chunks_total{disposition="full"}': 2.0,
    'kvpool_load_chunks_total{result="vouched"}': 12.0,
    "kvpool_evicted_chunks_total": 5.0,
}


def statistics(**changes: Any) -> Statistics:
    base = {
        "server_id": "node-1", "server_version": "0.1.0", "uptime_s": 7322.0, "ready": True, "draining": False,
        "chunk_tokens": 256, "l1_bytes": 8 << 30, "l1_used_bytes": 2 << 30, "l1_pinned_bytes": 1 << 20, "chunks": 16,
        "clients": 4, "sessions": 1, "leases": 1, "oldest_lease_s": 0.5, "counters": COUNTERS,
    }  # fmt: skip
    return Statistics(**{**base, **changes})


def test_names_of_metrics_are_those_of_the_catalogue() -> None:
    wanted = [value for name, value in vars(names).items() if name.isupper() and str(value).startswith("kvpool_")]

    assert len(wanted) >= 9
    assert [find(name).name for name in wanted] == wanted


def test_probes_are_no_engines_and_zeros_are_left_out() -> None:
    n = numbers_of(statistics())

    assert n.clients == 3
    assert n.lookups == {"all": 3, "missing": 1}
    assert (n.stored, n.present, n.skipped, n.hit_rate) == (16, 4, {"full": 2}, 0.75)


def test_a_label_is_summed_over_the_others() -> None:
    counters = {'m{a="x",b="1"}': 1.0, 'm{a="x",b="2"}': 2.0, 'm{a="y",b="1"}': 4.0, 'mm{a="x"}': 9.0}

    assert by_label(counters, "m", "a") == {"x": 3, "y": 4}
    assert total(counters, "m") == 7


def test_text_shows_what_an_operator_asks_for() -> None:
    text = as_text(statistics())

    for words in ("node-1", "ready", "up 2 h 2 min", "2 GiB of 8 GiB used (25%)", "75.0%", "oldest 0.5 s", "2 full"):
        assert words in text


def test_text_shows_damage_and_defects_only_when_there_are_any() -> None:
    bad = {**COUNTERS, "kvpool_checksum_mismatches_total": 1.0, "kvpool_illegal_moves_total": 2.0}

    assert "damaged" not in as_text(statistics())
    assert "damaged" in as_text(statistics(counters=bad))
    assert "defects" in as_text(statistics(counters=bad))


def test_json_has_numbers_and_verdict() -> None:
    found = json.loads(as_json(statistics(), [{"label": "engine-0"}]))

    assert found["hit_rate"] == 0.75
    assert found["verdict"]["kind"] == "hits"
    assert found["statistics"]["l1_used_bytes"] == 2 << 30
    assert found["clients"] == [{"label": "engine-0"}]


def test_clients_are_a_table_with_sizes_for_people() -> None:
    text = as_text(statistics(), [{"label": "engine-0", "pinned_bytes": 3 << 20}, {"label": "e", "pinned_bytes": 0}])

    assert "3 MiB" in text
    assert "engine-0" in text
    assert "no clients" in as_text(statistics(), [])
