# SPDX-License-Identifier: Apache-2.0
"""One client of whichever kvpool this process imports; run with another release's wheel on PYTHONPATH.

    python -m tests.fakes.skew_client store|load|watch ADDRESS MODE SEED

``store`` stores a prompt, ``load`` loads one and compares every byte, ``watch`` lets a link try for a while and prints
how it stands. Log lines go to standard error. Only what both releases have may be used here.
"""

import json
import logging
import sys
import threading
from pathlib import Path

from tests.fakes.blocks import NumpyBlocks

import kvpool
from kvpool.cli.bench.client import BenchClient, register
from kvpool.cli.bench.payload import Payload, bench_namespace, make_chain
from kvpool.client import keeper
from kvpool.client.link import Link
from kvpool.client.worker import WorkerAdapter
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind, Mode

CHUNK_TOKENS, CHUNKS, SHARD_BYTES = 16, 24, 64 << 10
TRIES_S = 1.0


def main(what: str, address: str, mode: str, seed: str) -> int:
    config = ClientConfig(server=address)
    said = watch(config) if what == "watch" else move(what, config, Mode(mode), int(seed))
    sys.stdout.write(json.dumps(said | {"code": str(Path(kvpool.__file__).parents[1])}) + "\n")
    return 0


def move(what: str, config: ClientConfig, mode: Mode, seed: int) -> dict[str, object]:
    namespace = bench_namespace(SHARD_BYTES, 0)
    chain = make_chain(namespace, seed, CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS, 0)
    with BenchClient(config, namespace, Payload(SHARD_BYTES, 0), CHUNKS, mode) as client:
        if what == "store":
            client.store(chain, "store")
            return {"chunks": chain.chunks}
        return {"compared": client.load(chain, "load").compared_bytes}


def watch(config: ClientConfig) -> dict[str, object]:
    """Be refused several times within a second."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    keeper._RETRY_REFUSED_S = 0.1
    link = Link(config, ClientKind.WORKER)
    link.registration = register(bench_namespace(SHARD_BYTES, 0), SHARD_BYTES, (Mode.STREAMED,))
    worker = WorkerAdapter(link, NumpyBlocks(1, 1), config)
    link.start()
    threading.Event().wait(TRIES_S)
    state = link.state
    worker.close(1.0)
    link.close()
    return {"healthy": state.healthy, "reason": str(state.reason)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
