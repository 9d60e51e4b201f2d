# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: ``client_child.py ADDRESS SEED COMMAND...``; says when each command has ended.

store        store eight chunks of random blocks, made from SEED
load         load them again into other blocks, and compare
fault        read where the device has no memory: the context is lost
wait         until standard input ends
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "cacheserver")]

CHUNKS = 8


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def fault() -> str:
    import torch

    index = torch.tensor([1 << 40], device="cuda")
    try:
        torch.zeros(4, device="cuda")[index].sum().item()
    except RuntimeError as e:
        return f"fault {type(e).__name__}"
    return "no fault"


def main() -> None:
    from tests.fakes.clients import digests
    from tests.gpu.contract import GpuEngine

    from kvpool.model.identity import Mode

    address, seed, commands = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    keys = digests(CHUNKS, str(seed))
    with GpuEngine(address, Mode.RING, blocks=256, model="child") as engine:
        engine.healthy()
        engine.blocks.fill(seed)
        wanted = engine.bytes_of(0, CHUNKS)
        say("ready")
        for number, command in enumerate(commands):
            said = command
            if command == "store":
                engine.store(keys, request_id=f"s{number}")
            elif command == "load":
                engine.blocks.memory[128:] = 0xA5
                answer = engine.lookup(keys, f"l{number}")
                bad = engine.load(answer, 128, request_id=f"l{number}")
                if bad or not np.array_equal(engine.bytes_of(128, CHUNKS), wanted):
                    said = f"wrong: {answer.chunks} chunks, bad {sorted(bad)}"
            elif command == "fault":
                said = fault()
            elif command == "wait":
                sys.stdin.read()
            say(said)


if __name__ == "__main__":
    main()
