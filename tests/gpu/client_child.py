# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: ``client_child.py ADDRESS SEED COMMAND...``; says when each command has ended.

Without commands they are read from standard input, one a line. KVPOOL_TEST_DEVICE is the number of its GPU.

store        store eight chunks of random blocks, made from SEED
load         load them again into other blocks, and compare
turns N      N times: store them under new keys, load, and compare
rough N      the same, but moves may fail: then the blocks must be named, and the others be right
healthy      wait until its mover is joined
device       say the UUID of its device
fault        read where the device has no memory: the context is lost
wait         until standard input ends
"""

import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "cacheserver")]

CHUNKS, TARGETS = 8, 128
POISON = 0xA5


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def choose_device() -> None:
    import torch

    torch.cuda.set_device(int(os.environ.get("KVPOOL_TEST_DEVICE", "0")))
    torch.zeros(1, device="cuda")


def fault() -> str:
    import torch

    index = torch.tensor([1 << 40], device="cuda")
    try:
        torch.zeros(4, device="cuda")[index].sum().item()
    except RuntimeError as e:
        return f"fault {type(e).__name__}"
    return "no fault"


class Work:
    """What an engine is told to do."""

    def __init__(self, engine, seed: int) -> None:
        self.engine, self.seed, self.number = engine, seed, 0
        engine.blocks.fill(seed)
        self.wanted = engine.bytes_of(0, CHUNKS)

    def store(self, keys: bytes) -> None:
        self.number += 1
        self.engine.store(keys, request_id=f"s{self.number}")

    def load(self, keys: bytes, *, rough: bool = False) -> str:
        """Return what is wrong, if anything."""
        self.number += 1
        self.engine.blocks.memory[TARGETS:] = POISON
        name = f"l{self.number}"
        answer = self.engine.lookup(keys, name)
        bad = self.engine.load(answer, TARGETS, request_id=name) if answer.chunks else frozenset()
        got = self.engine.bytes_of(TARGETS, answer.chunks)
        wrong = {TARGETS + int(n) for n in np.flatnonzero((got != self.wanted[: len(got)]).any(axis=1))}
        if wrong - bad or (not rough and (bad or answer.chunks != CHUNKS)):
            return f"wrong: {answer.chunks} chunks, bad {sorted(bad)}, wrong blocks {sorted(wrong)}"
        return ""

    def turns(self, count: int, *, rough: bool) -> str:
        from tests.fakes.clients import digests

        for _ in range(count):
            keys = digests(CHUNKS, f"{self.seed}/{self.number}")
            self.store(keys)
            if problem := self.load(keys, rough=rough):
                return problem
        return ""

    def does(self, command: str) -> str:
        """Do it; returns what to say."""
        from tests.fakes.clients import digests

        what, _, count = command.partition(" ")
        problem = ""
        if what == "store":
            self.store(digests(CHUNKS, str(self.seed)))
        elif what == "load":
            problem = self.load(digests(CHUNKS, str(self.seed)))
        elif what in ("turns", "rough"):
            problem = self.turns(int(count), rough=what == "rough")
        elif what == "healthy":
            self.engine.healthy()
        elif what == "device":
            from kvpool.transfer.cuda import Context, uuid_text

            return uuid_text(Context.current().uuid)
        elif what == "fault":
            return fault()
        elif what == "wait":
            sys.stdin.read()
        return problem or command


def main() -> None:
    choose_device()
    from tests.gpu.contract import GpuEngine

    from kvpool.model.identity import Mode

    address, seed, commands = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with GpuEngine(address, Mode.RING, blocks=256, model="child") as engine:
        engine.healthy()
        work = Work(engine, seed)
        say("ready")
        for command in commands or map(str.strip, sys.stdin):
            say(work.does(command))


if __name__ == "__main__":
    main()
