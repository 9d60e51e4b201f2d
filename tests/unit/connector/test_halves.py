# SPDX-License-Identifier: Apache-2.0
"""The halves put together: what they tell each other, and that no failure of ours reaches the engine."""

import logging
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.fakes.engine_parts import BLOCK, CHUNK, GROUPS, FakeRequest, engine_config

from kvpool.config import ClientConfig
from kvpool.connector.halves import SchedulerHalf, WorkerHalf
from kvpool.connector.plan import PlannedLoad, StepPlan, WorkerFacts, decode, encode
from kvpool.connector.scheduler import Step
from kvpool.connector.translate import engine_facts

NOBODY = ClientConfig(server="ipc:///nowhere/at/all", connect_s=5.0)
IDLE = Step((), lambda _: [], idle=True)
LOAD = PlannedLoad(
    request_id="r", lookup_id=b"l" * 16, first=0, end=1, blocks=np.arange(1, 5, dtype="<i8").tobytes(), skip_blocks=1
)


class Tensor:
    """What is asked of the engine's tensors, over an array."""

    def __init__(self, array, device="cpu"):
        self.array = array
        self.device = SimpleNamespace(type=device, index=0)
        self.shape = array.shape

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.array.ctypes.data, nbytes=lambda: self.array.nbytes)

    def element_size(self):
        return self.array.itemsize

    def storage_offset(self):
        return 0

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)


def tensors(device="cpu"):
    return {name: Tensor(np.zeros((64, 2, BLOCK, 8), np.float32), device) for name in ("layers.1", "layers.0")}


def engine(**changes):
    return engine_facts(*engine_config(**changes), hash_tokens=BLOCK, fingerprints=None)


def ours(caplog):
    """Lines of the connector itself; the client's link has its own."""
    return sum(record.name == "kvpool.connector" for record in caplog.records)


@pytest.fixture
def worker():
    half = WorkerHalf(NOBODY, "node")
    yield half
    half.close()


@pytest.fixture
def scheduler():
    half = SchedulerHalf(NOBODY, "node")
    yield half
    half.close()


def facts_of(rank=0, tp=1, **changes):
    half = WorkerHalf(NOBODY, "node")
    half.register(
        engine(parallel_config__rank=rank, parallel_config__tensor_parallel_size=tp),
        tensors(),
        {"layers.0": "p", "layers.1": "p"},
    )
    half.close()
    return msgspec.structs.replace(half.facts, **changes)


def test_a_worker_tells_its_planes_in_the_groups_order(worker) -> None:
    worker.register(engine(), tensors(), {"layers.0": "a", "layers.1": "b"})

    facts = decode(encode(worker.facts), WorkerFacts)

    assert facts == worker.facts
    assert [(p.name, p.block_bytes, p.packing) for p in facts.groups[0].planes] == [
        ("layers.0", 2 * BLOCK * 8 * 4, "a"),
        ("layers.1", 2 * BLOCK * 8 * 4, "b"),
    ]
    assert (facts.block_tokens, facts.hash_tokens, facts.refusal) == (BLOCK, BLOCK, "")


def test_memory_of_a_device_is_refused_by_name(worker) -> None:
    worker.register(engine(), tensors("xpu"), {"layers.0": "p", "layers.1": "p"})

    assert "xpu memory" in worker.facts.refusal


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no worker"),
        ([WorkerFacts(refusal="because")], "because"),
        ([facts_of(0, 2), facts_of(1, 2, groups=GROUPS)], "differ"),
        ([facts_of(0, 2), facts_of(1, 2, node="elsewhere")], "from this machine"),
        ([facts_of(0, 2)], "2 shards are expected"),
        ([facts_of(0, 2), facts_of(0, 2)], "2 shards are expected"),
    ],
)
def test_ranks_that_cannot_be_cached_together_run_uncached(scheduler, caplog, ranks, words) -> None:
    with caplog.at_level(logging.WARNING, "kvpool"):
        scheduler.attach([encode(facts) for facts in ranks])

    assert words in scheduler.refusal
    assert ours(caplog) == 1
    assert words in caplog.text
    request = FakeRequest("r", list(range(40)))
    scheduler.arrived(request, 0.0)
    assert scheduler.matched(request, 0, 0.0) == (0, False)
    assert scheduler.plan(IDLE) == StepPlan(idle=True)
    assert not scheduler.finished("r")
    assert scheduler.sample()["gauges"] == {"uncached:scheduler:unsupported": 1.0}


@pytest.mark.behaviour("R084")
def test_without_a_server_the_engine_starts_and_runs(scheduler, worker) -> None:
    facts = engine()
    worker.register(facts, tensors(), {"layers.0": "p", "layers.1": "p"})

    scheduler.attach([encode(worker.facts)])

    assert scheduler.sample()["gauges"] == {
        "uncached:scheduler:unreachable": 1.0,
        f"server:{NOBODY.server}:unreachable": 1.0,
    }
    request = FakeRequest("r", list(range(40)))
    scheduler.arrived(request, 0.0)
    assert scheduler.matched(request, 0, 0.0) == (0, False)
    scheduler.allocated("r", [[1, 2, 3]], 0)
    plan = scheduler.plan(Step([("r", 40)], lambda _: [list(range(1, 11))]))
    assert plan.stores == ()
    assert not scheduler.finished("r")


@pytest.mark.behaviour("R125")
def test_a_worker_that_was_never_registered_still_answers(worker) -> None:
    plan = StepPlan(chunk_tokens=CHUNK, loads=(LOAD,), released=("x",))

    worker.preempt(plan)
    worker.begin(plan)
    worker.load(plan)
    worker.saved(ran=True)

    assert worker.results(plan) == ({"x"}, {"r"})
    assert worker.bad_blocks() == {2, 3, 4}


@pytest.mark.parametrize("where", ["preempt", "begin", "load", "saved", "results"])
def test_a_failing_worker_ends_what_it_owes_and_stays_off(worker, caplog, where) -> None:
    worker.register(engine(), tensors(), {"layers.0": "p", "layers.1": "p"})
    plan = StepPlan(chunk_tokens=CHUNK, loads=(LOAD,), released=("x",))

    def broken(*_, **__):
        raise RuntimeError("planted")

    setattr(worker._side, where, broken)
    with caplog.at_level(logging.ERROR, "kvpool.connector"):
        for _ in range(2):
            worker.preempt(plan)
            worker.begin(plan)
            worker.load(plan)
            worker.saved(ran=True)
            assert worker.results(plan) == ({"x"}, {"r"})
            assert worker.bad_blocks() == {2, 3, 4}

    assert ours(caplog) == 1, "said once"
    assert worker._side.off
    assert worker.sample() == {"counters": {"faults": 1}, "gauges": {"uncached:worker:failed": 1.0}}


def test_a_failing_scheduler_misses_and_tells_the_workers(scheduler, worker, caplog) -> None:
    worker.register(engine(), tensors(), {"layers.0": "p", "layers.1": "p"})
    scheduler.attach([encode(worker.facts)])
    scheduler._side._next.released.append("held")
    request = FakeRequest("r", list(range(40)))
    scheduler.arrived(request, 0.0)

    def broken(*_):
        raise RuntimeError("planted")

    scheduler._side._hits.found = broken
    with caplog.at_level(logging.ERROR, "kvpool.connector"):
        assert [scheduler.matched(request, 0, 0.0) for _ in range(3)] == [(0, False)] * 3
        scheduler.allocated("r", [[1]], 0)
        plan = scheduler.plan(IDLE)

    assert (plan.off, plan.released) == (True, ("held",))
    assert scheduler.plan(IDLE) == StepPlan(off=True)
    assert not scheduler.finished("r")
    assert ours(caplog) == 1
    assert scheduler.sample()["counters"]["faults"] == 1


@pytest.mark.behaviour("D017")
def test_an_adapter_is_what_it_was_when_it_was_first_seen(scheduler, tmp_path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"one")
    adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    before = scheduler._identify(adapter)
    (tmp_path / "adapter.safetensors").write_bytes(b"two")

    assert scheduler._identify(adapter) == before, "the engine keeps what it loaded"
    adapter.lora_int_id = 2
    assert scheduler._identify(adapter) not in (None, before), "loaded again, under another id"
    adapter.load_inplace = True
    assert scheduler._identify(adapter) is None
    assert (
        scheduler._identify(SimpleNamespace(**(vars(adapter) | {"load_inplace": False, "lora_path": "org/x"}))) is None
    )
