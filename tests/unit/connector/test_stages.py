# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, by what a real engine of two stages told at its start.

vLLM 0.32 on CPU starts with two stages and ends with an error (an assertion in the second stage's worker) at its first
step, with any connector and with none. So no test runs such an engine; its handshakes are recorded, one for each stage,
with the machine, the model and the server renamed.
"""

import json
from pathlib import Path

import msgspec
import pytest

from kvpool.connector.facts import disagreement
from kvpool.connector.plan import WorkerFacts, decode
from kvpool.connector.servers import placements
from kvpool.connector.translate import registration
from kvpool.model.identity import GroupKind, Mode
from kvpool.model.keys import root_digest

RECORDED = Path(__file__).resolve().parents[2] / "golden" / "vllm" / "two-stages-0.32.0.json"
CHUNK_TOKENS = 256


@pytest.fixture
def stages() -> list[WorkerFacts]:
    return [decode(bytes.fromhex(row["facts"]), WorkerFacts) for row in json.loads(RECORDED.read_text())]


def test_both_stages_of_an_engine_fit_each_other(stages: list[WorkerFacts]) -> None:
    assert [(f.stage, f.stages, f.shard, f.refusal) for f in stages] == [(0, 2, 0, ""), (1, 2, 0, "")]
    assert disagreement(stages) == ""
    assert [[p.name for p in f.groups[0].planes] for f in stages] == [
        [f"model.layers.{n}.self_attn.attn" for n in layers] for layers in ((0, 1), (2, 3))
    ]


def test_each_stage_has_chunks_of_its_own_and_is_asked_apart(stages: list[WorkerFacts]) -> None:
    spaces = [registration(f, CHUNK_TOKENS, (0,), (Mode.STREAMED,)).namespace for f in stages]

    assert root_digest(spaces[0]) != root_digest(spaces[1])
    assert [(p.stage, p.shards) for p in placements(stages, "here")] == [(0, (0,)), (1, (0,))]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stage_that_says_nothing_makes_the_engine_uncached(stages: list[WorkerFacts], silent: int) -> None:
    del stages[silent]

    assert disagreement(stages) == f"2 pipeline stages are expected, and [{1 - silent}] have a worker"


def test_stages_whose_groups_are_of_different_kinds_are_not_cached_together(stages: list[WorkerFacts]) -> None:
    """One lookup would mean something else in each of them."""
    windows = tuple(msgspec.structs.replace(g, kind=GroupKind.WINDOW, window_tokens=8) for g in stages[1].groups)

    words = disagreement([stages[0], msgspec.structs.replace(stages[1], groups=windows)])

    assert words == "the ranks' caches differ in the kinds of their groups"


def test_stages_of_different_models_are_not_cached_together(stages: list[WorkerFacts]) -> None:
    """Within a stage all ranks agree; here one more rank of the first stage has another model."""
    other = msgspec.structs.replace(stages[0].namespace, model_fingerprint="another")  # type: ignore[type-var]

    assert disagreement([*stages, msgspec.structs.replace(stages[0], namespace=other)]) != ""
