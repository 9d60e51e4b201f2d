# SPDX-License-Identifier: Apache-2.0
"""Which way is prepared for blocks on a device: torch and Triton are stand-ins, the choice is real."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from kvpool.client.ports import BlockPort
from kvpool.config import ClientConfig
from kvpool.connector.gpu import NoKernel
from kvpool.connector.mapped import MappedOffer
from kvpool.connector.memory import Reach, reach
from kvpool.connector.ring import RingOffer
from kvpool.model.errors import ServerUnavailable
from kvpool.model.identity import Mode
from kvpool.transfer.mover.messages import Ring
from kvpool.transfer.planes import Layout, LayoutError, Plane
from kvpool.transfer.tensors import Storage
from kvpool.wire.messages import Register

LAYOUT = Layout(
    planes=(Plane(name="l", storage=0, offset=0, stride=64, block_bytes=64, packing="p"),), blocks=4, block_tokens=16
)
STORAGE = Storage(kind="cuda", device=0, address=1 << 20, length=256)
UUID = bytes(range(16))
RING, MAPPED, MOVED, STREAMED = Mode.RING, Mode.MAPPED, Mode.CLIENT_MOVED, Mode.STREAMED


class Context:
    uuid = UUID

    @staticmethod
    def allocation(address: int) -> tuple[int, int, bool]:
        del address
        return STORAGE.address, 4096, True


class Moments:
    def __init__(self, number: int) -> None:
        assert number == 0
        self.context = Context()

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def now(self) -> None: ...


class Device:
    short = ""

    def __init__(self, *_: object) -> None: ...

    @staticmethod
    def staged(stage_bytes: int) -> object:
        return stage_bytes

    def ring(self, slots: int, slot_bytes: int, keep_bytes: int) -> object:
        del keep_bytes
        if self.short:
            raise LayoutError(self.short)
        return SimpleNamespace(
            ring=Ring(device=UUID, handle=bytes(64), slots=slots, slot_bytes=slot_bytes, generation=0)
        )


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """Stand-ins for the modules that need torch and Triton."""
    for name, made in (("moments", Moments), ("device", Device)):
        module = ModuleType(name)
        setattr(module, made.__name__, made)
        monkeypatch.setitem(sys.modules, f"kvpool.connector.{name}", module)
    monkeypatch.setattr(Device, "short", "")
    return Device


@pytest.fixture
def no_triton(triton: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpool.connector.device", None)


def reached(*modes: Mode) -> Reach:
    return reach([LAYOUT], [STORAGE], ClientConfig(server="ipc:///nowhere", **({"modes": modes} if modes else {})))


def registered(made: Reach) -> Register:
    assert made.ring is not None
    return made.ring.offer.offer(Register(namespace=None, groups=(), shards=(), modes=made.modes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("triton")
def test_the_ring_is_what_an_engine_has_if_nothing_is_said() -> None:
    made = reached()

    assert made.ring is not None
    assert isinstance(made.ring.offer, RingOffer)
    assert MAPPED not in made.modes, "never by default before it was run on a device"


@pytest.mark.usefixtures("no_triton")
@pytest.mark.behaviour("D112")
def test_an_engine_without_triton_lets_a_mover_map_its_cache_if_that_is_allowed() -> None:
    made = reached(RING, MAPPED, MOVED, STREAMED)

    assert made.ring is not None
    assert isinstance(made.ring.offer, MappedOffer)
    assert made.modes == (MAPPED,), "it can do nothing else"
    register = registered(made)
    assert register.cache is not None
    assert (register.cache.device, register.cache.slots, register.cache.slot_bytes) == (UUID, 4, 32 << 20)
    assert "needs Triton" in register.no_ring
    blocks: BlockPort = made.blocks
    assert isinstance(blocks, NoKernel)
    with pytest.raises(ServerUnavailable, match="needs Triton"):
        blocks.gather(0, None, None)  # type: ignore[arg-type]
    with pytest.raises(ServerUnavailable, match="needs Triton"):
        blocks.scatter(0, None, 0, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_triton")
def test_an_engine_without_triton_is_refused_by_name_if_it_is_not() -> None:
    with pytest.raises(LayoutError, match=r"needs Triton.*or allow mode mapped"):
        reached()


def test_too_little_memory_for_a_ring_leaves_the_cache_itself(triton: type[Device]) -> None:
    triton.short = "3 MiB of device memory are free"

    made = reached(RING, MAPPED, STREAMED)

    assert made.ring is not None
    assert isinstance(made.ring.offer, MappedOffer)
    assert registered(made).no_ring == "3 MiB of device memory are free"
    assert made.modes == (RING, MAPPED, STREAMED)
    without = reached(RING, STREAMED)
    assert (without.ring, without.why_no_ring) == (None, "3 MiB of device memory are free")


@pytest.mark.usefixtures("triton")
def test_the_order_of_modes_decides() -> None:
    made = reached(MAPPED, RING, STREAMED)

    assert made.ring is not None
    assert isinstance(made.ring.offer, MappedOffer)
    assert reached(MOVED, STREAMED).ring is None


@pytest.mark.usefixtures("no_triton")
def test_each_offer_has_another_generation_and_chunks_must_fit_a_movers_slot() -> None:
    made = reached(MAPPED)

    assert [registered(made).cache.generation for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
    large = Plane(name="l", storage=0, offset=0, stride=64 << 20, block_bytes=64 << 20, packing="p")
    huge = reach(
        [Layout(planes=(large,), blocks=1, block_tokens=16)],
        [STORAGE],
        ClientConfig(server="ipc:///nowhere", modes=(MAPPED,)),
    )
    assert huge.ring is not None
    with pytest.raises(LayoutError, match="does not fit a ring slot"):
        huge.ring.offer.fit([1])
