# SPDX-License-Identifier: Apache-2.0
"""A client process that hangs in the middle of a store, to be killed there. Arguments: address, mode, model."""

import sys
import threading

from tests.fakes.clients import FakeEngine, digests

from kvpool.model.identity import Mode


class _Hanging:
    def __init__(self, blocks):
        self._blocks = blocks

    def gather(self, group, block_ids, out):
        if self._blocks.gathered:
            out[: len(out) // 2] = bytes(len(out) // 2)
            sys.stdout.write("in the middle\n")
            sys.stdout.flush()
            threading.Event().wait()
        self._blocks.gather(group, block_ids, out)


def main() -> None:
    address, mode, model = sys.argv[1:]
    engine = FakeEngine(address, Mode(mode), model=model, transfer_s=600)
    engine.worker._blocks = _Hanging(engine.blocks)
    with engine:
        engine.healthy()
        engine.begin_store(digests(3, "killed"))
        threading.Event().wait()


if __name__ == "__main__":
    main()
