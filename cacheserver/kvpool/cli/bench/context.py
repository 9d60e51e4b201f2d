# SPDX-License-Identifier: Apache-2.0
"""What every cell needs: options, a server, chains, clients."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.cli.bench.client import BenchClient
from kvpool.cli.bench.options import Options
from kvpool.cli.bench.own_server import OwnServer
from kvpool.cli.bench.payload import Chain, Payload, bench_namespace, make_chain
from kvpool.config import ClientConfig
from kvpool.model.identity import Mode, Namespace

__all__ = ["Context"]

LEAST_ROUNDS = 3
MOST_ROUNDS = 2000


@dataclass
class Context:
    """One run against one server."""

    options: Options
    config: ClientConfig
    chunk_tokens: int
    own: OwnServer | None
    """None if the user named a server: cells that end or inspect its process are skipped."""

    memory: str
    """Folder on a tmpfs for servers of the run's own."""

    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def namespace(self) -> Namespace:
        """Namespace of everything that this run stores."""
        return bench_namespace(self.options.shard_bytes, self.options.seed)

    @property
    def payload(self) -> Payload:
        """Maker and judge of bytes."""
        return Payload(self.options.shard_bytes, self.options.seed)

    @property
    def chunks(self) -> int:
        """Chunks of one request."""
        return self.options.tokens // self.chunk_tokens

    def chain(self, number: int) -> Chain:
        """Return prompt *number*."""
        return make_chain(self.namespace, number, self.options.tokens, self.chunk_tokens, self.options.seed)

    def new_chain(self) -> Chain:
        """Return a prompt that this run has not used yet."""
        return self.chain(next(self.numbers))

    def client(self, mode: Mode = Mode.CLIENT_MOVED) -> BenchClient:
        """Return an unconnected client with room for one request."""
        return BenchClient(self.config, self.namespace, self.payload, self.chunks, mode)

    def rounds(self) -> Iterator[int]:
        """Count rounds until the time of one cell is over: at least three, at most 2000."""
        end = time.monotonic() + self.options.seconds
        for i in range(MOST_ROUNDS):
            if i >= LEAST_ROUNDS and time.monotonic() >= end:
                return
            yield i
