# SPDX-License-Identifier: Apache-2.0
"""What the configuration says of stores and loads, from the halves' own constructor to what is done at a server."""

from types import SimpleNamespace

import pytest
from tests.fakes.engine_parts import BLOCK, CHUNK, FakeRequest, FullAttentionSpec, SlidingWindowSpec, group
from tests.fakes.ranks_apart import CHUNKS, PROMPT, RanksApart
from tests.fakes.scripted_server import ScriptedServer
from tests.unit.connector.test_halves import engine, tensors

from kvpool.config import ClientConfig
from kvpool.connector.halves import SchedulerHalf, WorkerHalf
from kvpool.connector.plan import encode
from kvpool.connector.scheduler import Step

SOURCE = list(range(1, 11))
TOKENS = 256
"""Of a step that shows how long a prompt takes."""


@pytest.fixture
def made(tmp_path):
    """Makes an engine of one rank with a server."""
    engines = []
    with ScriptedServer(tmp_path) as server:

        def make(**config):
            engines.append(RanksApart([server.address], **config))
            return engines[-1].healthy()

        yield make
        for one in engines:
            one.close()


@pytest.mark.parametrize(("least", "stored"), [(len(PROMPT), True), (len(PROMPT) + 1, False)])
def test_prompts_that_are_too_short_are_not_stored(made, least, stored) -> None:
    engine = made(store_min_tokens=least)
    engine.compute("one", SOURCE)

    assert engine.hit("two") == CHUNKS * CHUNK * stored


@pytest.mark.parametrize(("least", "found"), [(CHUNKS * CHUNK, True), (CHUNKS * CHUNK + 1, False)])
def test_hits_that_bring_too_few_tokens_are_not_loaded(made, least, found) -> None:
    engine = made(load_min_tokens=least)
    engine.compute("one", SOURCE)

    assert engine.hit("two") == CHUNKS * CHUNK * found


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def measured(engine, half, clock, *, load_s: float, bad: tuple[int, ...] = (), failed: tuple[str, ...] = ()) -> None:
    """Show *half* three prompts that take a second each, and three loads."""
    for number in range(3):
        half.plan(Step([], lambda _: [], tokens=TOKENS))
        clock.now_s += 1.0
        half.received((), ())
        request_id = f"load{number}"
        assert engine.hit(request_id) == CHUNKS * CHUNK
        half.allocated(request_id, [SOURCE], CHUNKS * CHUNK)
        clock.now_s += load_s
        half.received({request_id}, bad, failed)
        half.finished(request_id)


@pytest.mark.parametrize(
    ("budget", "load_s", "made_of_it"),
    [(1.0, 0.05, True), (1.0, 5.0, False), (0.0, 5.0, True), (100.0, 5.0, True)],
)
def test_loads_that_took_longer_than_computing_are_not_made(made, budget, load_s, made_of_it) -> None:
    engine = made(load_budget=budget)
    engine.compute("one", SOURCE)
    clock = Clock()
    engine.scheduler._clock = clock

    measured(engine, engine.scheduler, clock, load_s=load_s)

    assert engine.hit("then") == CHUNKS * CHUNK * made_of_it


@pytest.mark.parametrize("trouble", [{"bad": (1,)}, {"failed": ("load0", "load1", "load2")}])
def test_loads_that_failed_say_nothing_of_how_long_loads_take(made, trouble) -> None:
    engine = made(load_budget=1.0)
    engine.compute("one", SOURCE)
    clock = Clock()
    engine.scheduler._clock = clock

    measured(engine, engine.scheduler, clock, load_s=5.0, **trouble)

    assert engine.hit("then") == CHUNKS * CHUNK


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ([group(FullAttentionSpec(block_size=BLOCK))], 0),
        (
            [
                group(FullAttentionSpec(block_size=BLOCK), layer_names=["layers.0"]),
                group(SlidingWindowSpec(block_size=BLOCK, sliding_window=8), layer_names=["layers.1"]),
            ],
            1,
        ),
    ],
)
def test_a_model_of_several_groups_always_computes_a_token(tmp_path, groups, left) -> None:
    """What its last token needs, a hit of the whole prompt would not bring."""
    with ScriptedServer(tmp_path) as server:
        config = ClientConfig(server=server.address)
        worker, scheduler = WorkerHalf(config, "here"), SchedulerHalf(config, "here")
        try:
            worker.register(engine(cache__kv_cache_groups=groups), tensors(), {"layers.0": "p", "layers.1": "p"})
            scheduler.attach([encode(worker.facts)])

            most = scheduler._side._hits._most_tokens(
                SimpleNamespace(request=FakeRequest("r", PROMPT), wishes=SimpleNamespace(max_load_tokens=None))
            )
        finally:
            worker.close()
            scheduler.close()

    assert most == len(PROMPT) - left
