# SPDX-License-Identifier: Apache-2.0
"""A short fault campaign, and proof that it would find what it looks for. The long one is ``make torture``."""

import threading
from pathlib import Path

import pytest
from tests.fakes.fault_client import FaultClient, Order, WrongError
from tests.fakes.fault_proxy import FaultProxy, Rates
from tests.fakes.running_server import running_server
from tests.property import fault_campaign

ALL = ("drop", "delay", "duplicate", "truncate", "reorder", "hang_up")


@pytest.mark.slow
def test_nothing_wrong_hanging_or_leaked_when_everything_fails(capsys) -> None:
    code = fault_campaign.main(["--ops", "300", "--seconds", "15", "--seed", "20261129"])

    assert code == 0, capsys.readouterr().out


def order(address: str) -> Order:
    return Order(server=address, mode="streamed", seed=3, ops=25, shard_bytes=4096)


def test_messages_meet_with_faults(tmp_path: Path) -> None:
    rates = Rates(drop=0.02, delay=0.05, duplicate=0.05, truncate=0.02, reorder=0.05, hang_up=0.01)
    with running_server(tmp_path), FaultProxy(tmp_path / "p.sock", tmp_path / "run" / "kvpool.sock", 5, rates) as proxy:
        client = FaultClient(order(proxy.address))
        client.run()
        client.close()

    assert client.counts["ops"] == 25
    assert len(set(ALL) & set(proxy.counts)) > 3
    assert proxy.counts["passed"] > sum(proxy.counts[what] for what in ALL)


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    with (
        running_server(tmp_path),
        FaultProxy(tmp_path / "p.sock", tmp_path / "run" / "kvpool.sock", 5, Rates(*[0.0] * 6)) as proxy,
    ):
        client = FaultClient(order(proxy.address))
        scatter = client._blocks.scatter

        def damaged(group, block_ids, skip_blocks, data) -> None:
            scatter(group, block_ids, skip_blocks, data)
            client._blocks.memory[int(block_ids[0]), 2000] ^= 1

        client._blocks.scatter = damaged
        with pytest.raises(WrongError, match="WRONG BYTES"):
            client.run()
        client.close()


def test_what_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.fault_client.HANG_S", 0.3)
    with (
        running_server(tmp_path),
        FaultProxy(tmp_path / "p.sock", tmp_path / "run" / "kvpool.sock", 5, Rates(*[0.0] * 6)) as proxy,
    ):
        client = FaultClient(order(proxy.address))
        go_on = threading.Event()
        client._blocks.gather = lambda *_: go_on.wait(30)
        with pytest.raises(WrongError, match="HANGS"):
            client.run()
        go_on.set()
        client.close()
