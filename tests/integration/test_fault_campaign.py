# SPDX-License-Identifier: Apache-2.0
"""A short fault campaign, and proof that it would find what it looks for. The long one is ``make torture``."""

import threading
from pathlib import Path

import pytest
from tests.fakes.fault_client import FaultClient, Order, WrongError
from tests.fakes.fault_proxy import FaultProxy, Rates
from tests.fakes.running_server import running_server
from tests.property import fault_campaign

ALL = fault_campaign.FAULTS


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_wrong_hanging_or_leaked_when_everything_fails(capsys) -> None:
    code = fault_campaign.main(["--ops", "300", "--seconds", "60", "--seed", "20261129"])

    assert code == 0, capsys.readouterr().out


ENOUGH = {"ops": 3000, "chunks compared": 5000, "messages passed": 20_000, "ops without a server": 90}
ENOUGH |= {f"messages {name}": 80 for name in ALL} | dict.fromkeys(fault_campaign.ACTS, 30)


@pytest.mark.parametrize(
    ("counts", "missing"),
    [
        ({}, []),
        ({"ops": 5, "chunks compared": 5, "ops without a server": 0}, ["only 5 operations ended"]),
        ({"ops without a server": 1501}, ["most operations had no server"]),
        ({"chunks compared": 800}, ["hardly a chunk was compared"]),
        ({"messages reorder": 0}, ["no message met with reorder"]),
        (dict.fromkeys(fault_campaign.ACTS, 0), ["hardly a process was harmed"]),
        ({f"messages {name}": 1 for name in ALL}, ["hardly a message was harmed"]),
        ({"kill server": 0} | {a: 60 for a in fault_campaign.ACTS if a != "kill server"}, ["no kill server"]),
    ],
)
def test_a_campaign_that_did_too_little_fails(counts, missing) -> None:
    assert fault_campaign.shortfall(ENOUGH | counts, 3000, fault_campaign.ACTS) == missing


def test_a_short_run_need_not_have_met_with_everything() -> None:
    counts = {"ops": 40, "chunks compared": 70, "messages passed": 300, "messages delay": 5}

    assert not fault_campaign.shortfall(counts, 40, fault_campaign.ACTS)


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
