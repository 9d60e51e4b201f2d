# SPDX-License-Identifier: Apache-2.0
"""One engine over two nodes, each with a server of its own: two network namespaces stand for the machines."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.harness import Node, Nodes, Pool, Server, TwoNodeEngine, connector, server, until

from kvpool.cli.engine import metrics_of, view_of

pytestmark = [
    pytest.mark.skipif(not Nodes.allowed(), reason="needs the right to make network namespaces (root)"),
    pytest.mark.timeout(400),
]


def prompt(seed: str, tokens: int = 1100) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with Nodes(2) as made:
        yield made


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, nodes: list[Node], pool: Pool) -> Iterator[list[Server]]:
    with (
        server(tmp_path_factory.mktemp("a"), node=nodes[0], pool=pool) as first,
        server(tmp_path_factory.mktemp("b"), node=nodes[1], pool=pool) as second,
    ):
        yield [first, second]


@pytest.fixture(scope="module")
def engine(
    engine_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
    small_model: Path,
    nodes: list[Node],
    servers: list[Server],
    pool: Pool,
) -> Iterator[TwoNodeEngine]:
    folder = tmp_path_factory.mktemp("e")
    # Each process is told its own node's server and nothing of the other.
    transfers = [connector(each.address, **pool.client) for each in servers]
    running = TwoNodeEngine(engine_python, folder, small_model, transfers, nodes)
    try:
        running.ready()
        for each in servers:
            until(lambda each=each: each.statistics().clients >= 3, 60, "a rank, the scheduler and the probe")
        yield running
    finally:
        running.close()


def reset(engine: TwoNodeEngine) -> None:
    engine.post("/reset_prefix_cache")


@pytest.mark.behaviour("R111", "R114")
def test_each_rank_keeps_its_part_at_its_own_node_and_the_smallest_answer_is_the_hit(
    engine: TwoNodeEngine, servers: list[Server]
) -> None:
    made = prompt("both")
    cold = engine.complete(made)
    for each in servers:
        each.wait_chunks(4)
    reset(engine)
    loaded = engine.complete(made)

    assert (cold["cached"], loaded["cached"]) == (0, 1024)
    assert loaded["tokens"] == cold["tokens"]
    assert len(set(cold["tokens"])) > 4
    assert engine.metric("vllm:kvpool_failed_loads_total") == 0


@pytest.mark.behaviour("D076")
def test_a_killed_server_costs_a_recompute_and_comes_back_with_its_part(
    engine: TwoNodeEngine, servers: list[Server]
) -> None:
    made = prompt("killed")
    before = [each.statistics().chunks for each in servers]
    cold = engine.complete(made)
    for each, chunks in zip(servers, before, strict=True):
        each.wait_chunks(chunks + 4)
    reset(engine)

    servers[1].kill()
    alone = engine.complete(made)
    until(lambda: engine.complete(prompt("tick", 20)) and engine.metric("vllm:kvpool_servers_down") == 1, 30, "notice")
    seen = view_of(metrics_of(engine.url)).servers
    reset(engine)
    servers[1].start()
    until(lambda: servers[1].statistics().clients >= 3, 60, "the return of the rank and the scheduler")
    until(lambda: engine.complete(prompt("tock", 20)) and engine.metric("vllm:kvpool_servers_down") == 0, 30, "return")
    loaded = engine.complete(made)

    assert [s["server"].partition("#")[0] for s in seen if s["state"] == "up"] == [servers[0].address]
    assert len(seen) == 2
    assert {s["state"] for s in view_of(metrics_of(engine.url)).servers} == {"up"}
    assert (cold["cached"], alone["cached"], loaded["cached"]) == (0, 0, 1024)
    assert cold["tokens"] == alone["tokens"] == loaded["tokens"]
