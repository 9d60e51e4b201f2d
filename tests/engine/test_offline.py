# SPDX-License-Identifier: Apache-2.0
"""Real engines on a CPU against real servers: same tokens, whether computed, loaded, or loaded in vain."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.harness import MIB, Engine, Server, connector, engine, server, until
from tests.fakes.hold_proxy import HoldProxy

FAILED, BAD = "vllm:kvpool_failed_loads", "vllm:kvpool_bad_blocks"
STORED = "vllm:kvpool_stored_chunks"


def prompt(seed: object, tokens: int = 1100) -> list[int]:
    """Token ids that no other test uses."""
    numbers = random.Random(f"{seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


def wait_clients(at: Server, count: int) -> None:
    """Wait until that many clients are registered, the asking one among them."""
    until(lambda: at.statistics().clients >= count, 60, f"{count} clients")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    """A server for the engines that do not need one of their own."""
    with server(folder) as running:
        yield running


@dataclass(frozen=True)
class Engines:
    """Three processes at the same time."""

    plain: Engine
    first: Engine
    second: Engine
    proxy: HoldProxy
    """Between the second one and the server."""


@pytest.fixture(scope="module")
def engines(engine_python: Path, folder: Path, small_model: Path, shared: Server) -> Iterator[Engines]:
    """Started together: a start waits as much as it computes."""
    with ExitStack() as stack:
        proxy = stack.enter_context(HoldProxy(folder / "p.sock", shared.socket))
        transfers = [None, connector(shared.address), connector(proxy.address, modes=["streamed"], transfer_s=20)]
        made = []
        for transfer in transfers:
            made.append(Engine(engine_python, folder, small_model, kv_transfer_config=transfer))
            stack.callback(made[-1].close)
        yield Engines(*(each.ready() for each in made), proxy)
        for each in made:
            each.let_go()


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Engine:
    """An engine without a cache server: what is right."""
    return engines.plain


@pytest.fixture(scope="module")
def first(engines: Engines) -> Engine:
    return engines.first


@pytest.fixture(scope="module")
def second(engines: Engines) -> Engine:
    """Another process; it streams where the first one maps memory."""
    return engines.second


@dataclass(frozen=True)
class Few:
    """An engine with few blocks that was there before its server, which is small."""

    engine: Engine
    server: Server
    early: list[int]
    alone: dict
    """What it made of the prompt *early* before there was a server."""

    uncached: dict[str, float]
    """Its metrics then."""


@pytest.fixture(scope="module")
def few(engine_python: Path, tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Few]:
    place = tmp_path_factory.mktemp("f")
    small = Server(place, size_bytes=16 * MIB)
    options = {"max_model_len": 2048, "num_gpu_blocks_override": 80, "kv_transfer_config": connector(small.address)}
    try:
        with engine(engine_python, place, small_model, **options) as running:
            early = prompt("early")
            alone, uncached = running.generate([early]), running.metrics()
            running.reset()
            small.start()
            wait_clients(small, 3)
            yield Few(running, small, early, alone, uncached)
    finally:
        small.close()


@pytest.mark.behaviour("R024", "R052")
@pytest.mark.parametrize("tokens", [1100, 1024, 300])
def test_another_process_loads_what_the_first_one_stored(
    plain: Engine, first: Engine, second: Engine, shared: Server, tokens: int
) -> None:
    wait_clients(shared, 5)
    made = prompt(f"share {tokens}", tokens)
    expected = plain.generate([made])["tokens"]
    before = shared.statistics().chunks

    cold = first.generate([made])
    shared.wait_chunks(before + tokens // 256)
    loaded = second.generate([made])

    assert cold["tokens"] == loaded["tokens"] == expected
    assert (cold["cached"], loaded["cached"]) == ([0], [tokens // 256 * 256])
    assert len(set(expected[0])) > 4, "a model that repeats itself cannot show an error"


def test_what_was_streamed_can_be_mapped_and_the_other_way_round(first: Engine, second: Engine, shared: Server) -> None:
    wait_clients(shared, 5)
    made = prompt("modes")
    before = shared.statistics().chunks

    cold = second.generate([made])
    shared.wait_chunks(before + 4)
    loaded = first.generate([made])

    assert loaded["cached"] == [1024]
    assert loaded["tokens"] == cold["tokens"]


@pytest.mark.behaviour("R076")
def test_salts_separate(first: Engine, second: Engine, shared: Server) -> None:
    wait_clients(shared, 5)
    made = prompt("salt")
    before = shared.statistics().chunks
    first.generate([made], salt="a")
    shared.wait_chunks(before + 4)

    assert second.generate([made])["cached"] == [0]
    assert second.generate([made], salt="b")["cached"] == [0]
    assert second.generate([made], salt="a")["cached"] == [1024]


def test_generated_tokens_are_not_stored(first: Engine, shared: Server) -> None:
    wait_clients(shared, 3)
    before = shared.statistics().chunks
    made = prompt("generated", 500)

    first.generate([made], max_tokens=40)
    first.reset()

    assert shared.statistics().chunks == before + 1


def test_many_requests_at_once(plain: Engine, first: Engine, second: Engine, shared: Server) -> None:
    """Batches change a CPU engine's sums, so tokens are compared for the prompts that were computed alone."""
    wait_clients(shared, 5)
    before = shared.statistics().chunks
    made = [prompt(f"many {i}", 520 + 40 * i) for i in range(6)]
    first.generate(made)
    shared.wait_chunks(before + sum(len(p) // 256 for p in made))

    together = second.generate(made)

    assert together["cached"] == [len(p) // 256 * 256 for p in made]
    assert together["reasons"] == ["length"] * 6
    assert plain.generate(made[:1])["tokens"] == first.generate(made[:1])["tokens"]


@pytest.mark.behaviour("R088", "R127", "D062", "D069")
def test_a_killed_server_keeps_its_chunks(first: Engine, shared: Server) -> None:
    wait_clients(shared, 3)
    made = prompt("restart")
    before, clients = shared.statistics().chunks, shared.statistics().clients
    cold = first.generate([made])
    shared.wait_chunks(before + 4)
    first.reset()

    shared.kill()
    alone = first.generate([made])
    first.reset()
    shared.start()
    wait_clients(shared, clients)
    loaded = first.generate([made])

    assert (alone["cached"], loaded["cached"]) == ([0], [1024])
    assert cold["tokens"] == alone["tokens"] == loaded["tokens"]


def test_a_damaged_layer_changes_the_tokens(first: Engine, second: Engine, shared: Server) -> None:
    """The negative control of this file: loaded bytes are used, and a wrong one is seen."""
    wait_clients(shared, 5)
    made = [prompt(f"damage {i}") for i in range(2)]
    before = shared.statistics().chunks
    cold = [first.generate([p])["tokens"] for p in made]
    shared.wait_chunks(before + 8)
    second.damage(0, 2)
    loaded = [second.generate([p]) for p in made]
    second.damage()

    assert [answer["cached"] for answer in loaded] == [[1024], [1024]]
    assert all(answer["tokens"] != tokens for answer, tokens in zip(loaded, cold, strict=True))


@pytest.mark.behaviour("R098", "R104", "D053", "D054", "D055")
def test_a_server_that_dies_during_a_load_costs_a_recompute(engines: Engines, shared: Server) -> None:
    running = engines.second
    for tag, nth in [("prepare_retrieve", 1), ("read_chunk", 3), ("commit_retrieve", 1)]:
        wait_clients(shared, 5)
        made = prompt(f"die at {tag}")
        chunks, before = shared.statistics().chunks, running.metrics()
        assert running.generate([made])["cached"] == [0]
        shared.wait_chunks(chunks + 4)
        running.reset()

        hold = engines.proxy.hold(tag, nth)
        running.begin([made])
        hold.wait_held(60)
        shared.kill()
        hold.release()
        answer = running.end()

        assert answer["tokens"] == engines.plain.generate([made])["tokens"]
        assert answer["reasons"] == ["length"]
        counted = running.metrics()
        assert counted[FAILED] - before[FAILED] == 1
        assert counted[BAD] - before[BAD] == 32, "all four chunks of the load"
        assert counted["vllm:kvpool_loads_in_flight"] == 0
        shared.start()


@pytest.mark.behaviour("R084", "R088")
def test_an_engine_that_starts_before_its_server(few: Few, plain: Engine) -> None:
    running = few.engine
    running.reset()
    stored = running.generate([few.early])
    few.server.wait_no_leases()
    running.reset()
    loaded = running.generate([few.early])
    attached = running.metrics()

    assert few.alone["tokens"] == stored["tokens"] == loaded["tokens"] == plain.generate([few.early])["tokens"]
    assert [a["cached"] for a in (few.alone, stored, loaded)] == [[0], [0], [1024]]
    for half in ("scheduler", "worker"):
        name = f'vllm:kvpool_uncached{{half="{half}",reason="unreachable"}}'
        assert (few.uncached[name], attached[name]) == (1, 0)


@pytest.mark.behaviour("R133", "D057")
def test_preempted_requests_store_nothing_wrong(few: Few, plain: Engine) -> None:
    """Two requests that together need more blocks than there are; what they stored is then loaded, and right."""
    running, small = few.engine, few.server
    running.reset()
    made = [prompt(f"preempt {i}") for i in range(2)]
    expected = [plain.generate([p])["tokens"] for p in made]
    before = running.metrics()
    crowded = running.generate(made, max_tokens=300)
    counted = running.metrics()
    small.wait_no_leases()
    running.reset()
    loaded = [running.generate([p]) for p in made]

    assert counted["vllm:num_preemptions"] > before["vllm:num_preemptions"]
    assert counted[STORED] == before[STORED] + 8
    assert crowded["reasons"] == ["length", "length"]
    assert [answer["cached"] for answer in loaded] == [[1024], [1024]]
    assert [answer["tokens"] for answer in loaded] == expected


@pytest.mark.behaviour("D105")
def test_under_pressure_tokens_stay_right(few: Few, plain: Engine) -> None:
    """Twelve prompts of four chunks, a cache of some fifteen: most are evicted before they come again."""
    running, small = few.engine, few.server
    running.reset()
    made = [prompt(f"pressure {i}") for i in range(12)]
    expected = [plain.generate([p])["tokens"] for p in made]
    hits = 0
    for turn in range(2):
        for number in [*range(12), 11, 11]:
            answer = running.generate([made[number]])
            assert answer["tokens"] == expected[number], f"turn {turn}, prompt {number}"
            hits += answer["cached"][0] > 0
            running.reset()
    statistics = small.statistics()

    assert hits >= 3, "what was used last is still there"
    assert any(value > 0 for name, value in statistics.counters.items() if "evicted" in name), statistics.counters


@pytest.mark.behaviour("R012", "R044", "R025")
def test_two_ranks_store_and_load_their_own_parts(
    engine_python: Path, tmp_path_factory: pytest.TempPathFactory, small_model: Path
) -> None:
    place = tmp_path_factory.mktemp("t")
    made = prompt("ranks")
    with (
        server(place) as own,
        engine(
            engine_python,
            place,
            small_model,
            threads="0|1",
            tensor_parallel_size=2,
            kv_transfer_config=connector(own.address),
        ) as running,
    ):
        wait_clients(own, 4)
        cold = running.generate([made])
        own.wait_chunks(2 * 4)
        running.reset()
        loaded = running.generate([made])
        counted = running.metrics()

    assert (cold["cached"], loaded["cached"]) == ([0], [1024])
    assert cold["tokens"] == loaded["tokens"]
    assert counted["vllm:kvpool_stored_chunks"] == 2 * 4
    assert counted[FAILED] == 0


def test_two_ranks_with_a_server_each_hit_only_while_both_are_there(
    engine_python: Path, tmp_path_factory: pytest.TempPathFactory, small_model: Path
) -> None:
    made, later = prompt("servers"), prompt("one server")
    with server(tmp_path_factory.mktemp("a")) as a, server(tmp_path_factory.mktemp("b")) as b:
        transfer = connector(a.address, servers=[a.address, b.address])
        transfer |= {"kv_connector": "RankedConnector", "kv_connector_module_path": "ranked_connector"}
        with engine(
            engine_python,
            tmp_path_factory.mktemp("e"),
            small_model,
            threads="0|1",
            tensor_parallel_size=2,
            kv_transfer_config=transfer,
        ) as running:
            for each in (a, b):
                wait_clients(each, 3)
            cold = running.generate([made])
            for each in (a, b):
                each.wait_chunks(4)
            running.reset()
            loaded = running.generate([made])

            b.kill()
            running.reset()
            missed = running.generate([made])
            running.generate([later])
            a.wait_chunks(8)
            counted = running.metrics()

    assert (cold["cached"], loaded["cached"], missed["cached"]) == ([0], [1024], [0])
    assert cold["tokens"] == loaded["tokens"] == missed["tokens"]
    assert counted[FAILED] == 0
    assert counted["vllm:kvpool_servers_down"] == 1


@pytest.mark.behaviour("R121")
def test_a_wrong_setting_stops_the_start(engine_python: Path, folder: Path, small_model: Path) -> None:
    wrong = Engine(engine_python, folder, small_model, kv_transfer_config=connector("ipc:///nowhere", lookup_seconds=1))
    try:
        log = wrong.failed_to_start()
    finally:
        wrong.close()

    assert "lookup_seconds" in log
    assert "ConfigError" in log
