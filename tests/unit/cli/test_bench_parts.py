# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the bench: bytes with an identity, percentiles, a table that refuses unverified numbers."""

import msgspec
import numpy as np
import pytest

from kvpool.cli.bench.lives import resident_metadata_bytes
from kvpool.cli.bench.payload import Payload, bench_namespace, make_chain
from kvpool.cli.bench.results import BenchReport, Cell, spread, table
from kvpool.cli.errors import Failure


@pytest.mark.parametrize("shard_bytes", [64, 4096])
def test_one_changed_byte_anywhere_is_noticed(shard_bytes: int) -> None:
    payload, data = Payload(shard_bytes, seed=3), np.empty(shard_bytes, np.uint8)
    payload.fill(b"d" * 32, data)

    assert payload.same(b"d" * 32, data)
    for i in (0, shard_bytes // 2, shard_bytes - 1):
        wrong = data.copy()
        wrong[i] ^= 1
        assert not payload.same(b"d" * 32, wrong)


def test_chunks_of_other_prompts_have_other_bytes() -> None:
    namespace = bench_namespace(4096, 1)
    chains = [make_chain(namespace, n, 1024, 256, seed=1) for n in range(2)]
    payload, data = Payload(4096, 1), np.empty(4096, np.uint8)

    payload.fill(chains[0].digest(1), data)

    assert chains[0].chunks == 4
    assert not payload.same(chains[1].digest(1), data)
    assert not payload.same(chains[0].digest(2), data)
    assert make_chain(namespace, 1, 1024, 256, seed=1).digests == chains[1].digests


def test_percentiles() -> None:
    s = spread([float(v) for v in range(101)])

    assert (s.count, s.p50, s.p90, s.p99, s.least, s.most) == (101, 50.0, 90.0, 99.0, 0.0, 100.0)


def test_a_number_without_compared_bytes_is_not_printed() -> None:
    good = Cell(name="a", what="w", unit="ms", value=1.5, compared_bytes=1 << 20)

    assert "1.5" in table([good])
    with pytest.raises(Failure, match="no bytes were compared"):
        table([good, Cell(name="b", what="w", unit="ms", value=1.0)])


def test_a_cell_that_was_not_measured_says_why() -> None:
    text = table([Cell(name="restart", what="", unit="s", skipped="needs a server of its own")])

    assert "not measured: needs a server of its own" in text


def test_the_report_survives_its_json() -> None:
    cell = Cell(name="a", what="w", unit="ms", value=1.5, spread=spread([1.5]), compared_bytes=1)
    report = BenchReport(bench="control", cells=(cell,), options={"tokens": 1}, machine={"cores": 2})

    assert msgspec.json.decode(msgspec.json.encode(report), type=BenchReport) == report


def test_metadata_is_heap_and_headers_without_chunks(tmp_path) -> None:
    maps = [
        ("7f00-7f01 rw-p 00000000 00:00 0 ", 8),
        ("7f01-7f02 rw-p 00000000 00:00 0                          [heap]", 4),
        ("7f02-7f03 rw-s 00000000 00:17 9      /dev/shm/kvpool/kvpool.local.v1.0.head", 12),
        ("7f03-7f04 rw-s 00000000 00:17 9      /dev/shm/kvpool/kvpool.local.v1.0.data", 4096),
        ("7f04-7f05 r-xp 00000000 fe:00 1      /usr/lib/libc.so.6", 2048),
    ]
    (tmp_path / "7").mkdir()
    lines = [f"{head}\nSize:   99999 kB\nRss:   {kib} kB\nPss:  1 kB\nVmFlags: rd wr" for head, kib in maps]
    (tmp_path / "7" / "smaps").write_text("\n".join(lines) + "\n")

    assert resident_metadata_bytes(7, tmp_path) == 24 * 1024
