# SPDX-License-Identifier: Apache-2.0
"""Models with several cache groups: what one process stored, a new one loads, whole and right."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import model
from tests.engine.harness import Engine, Server, connector, engine, until

FAILED = "vllm:kvpool_failed_loads"
WINDOW = {"block_size": 32}
# This build's kernel of recurrent layers takes nothing else.
STATE = {"block_size": None, "dtype": "bfloat16"}
SHAPES = {
    # model: cache groups, tokens of a chunk, engine options, tokens of a prompt, those that can hit
    "window": (3, 256, WINDOW, 1100, 1024),
    # The engine makes its blocks as large as a state. The prompt ends soon after what can hit: a state fades.
    "state": (4, 384, STATE, 769, 768),
}


def prompt(seed: object, tokens: int) -> list[int]:
    numbers = random.Random(f"models {seed}")
    return [numbers.randrange(10, 2000) for _ in range(tokens)]


class Shape:
    """One model, its server, and an engine that stores."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self.name, self.python, self.folder = name, python, folder
        self.groups, self.chunk_tokens, self.options, self.tokens, self.hit_tokens = SHAPES[name]
        self.model = model(python, name)
        self.server = Server(folder, chunk_tokens=self.chunk_tokens)

    def engine(self, **options: object) -> object:
        transfer = connector(self.server.address)
        return engine(self.python, self.folder, self.model, kv_transfer_config=transfer, **(self.options | options))

    def settled(self) -> None:
        """Wait until no store is under way."""
        self.server.wait_no_leases()


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request: pytest.FixtureRequest, engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    made = Shape(request.param, engine_python, tmp_path_factory.mktemp("m"))
    try:
        made.server.start()
        yield made
    finally:
        made.server.close()


@pytest.fixture(scope="module")
def stored(shape: Shape) -> dict[str, list]:
    """Prompts and what a first process made of them; it has ended."""
    prompts = [prompt(f"{shape.name} {n}", shape.tokens) for n in range(2)] + [prompt("in two steps", shape.tokens)]
    with shape.engine(max_num_batched_tokens=640) as first:
        until(lambda: shape.server.statistics().clients >= 3, 60, "its clients")
        cold = [first.generate([p]) for p in prompts]
        shape.settled()
    assert [answer["cached"] for answer in cold] == [[0]] * 3
    assert all(len(set(answer["tokens"][0])) > 4 for answer in cold), "a model that repeats itself shows no error"
    return {"prompts": prompts, "tokens": [answer["tokens"] for answer in cold]}


@pytest.fixture(scope="module")
def second(shape: Shape, stored: dict[str, list]) -> Iterator[Engine]:
    """A new process."""
    del stored
    with shape.engine() as running:
        until(lambda: shape.server.statistics().clients >= 3, 60, "its clients")
        yield running


@pytest.mark.behaviour("R024", "R123", "R124")
def test_a_new_process_restores_every_group(shape: Shape, stored: dict[str, list], second: Engine) -> None:
    second.reset()
    loaded = [second.generate([p]) for p in stored["prompts"]]
    counted = second.metrics()

    assert [answer["cached"] for answer in loaded] == [[shape.hit_tokens]] * 3
    assert [answer["tokens"] for answer in loaded] == stored["tokens"]
    assert counted[FAILED] == 0


def test_damage_in_any_group_changes_the_tokens(shape: Shape, stored: dict[str, list], second: Engine) -> None:
    """The negative control: what is loaded into each group is used."""
    for group in range(shape.groups):
        second.reset()
        second.damage(group, -1)
        loaded = [second.generate([p]) for p in stored["prompts"]]
        second.damage()

        assert [answer["cached"] for answer in loaded] == [[shape.hit_tokens]] * 3
        assert any(a["tokens"] != tokens for a, tokens in zip(loaded, stored["tokens"], strict=True)), group
    second.reset()
