# SPDX-License-Identifier: Apache-2.0
"""Two namespaces' pods at one real server, with signed tokens and a share of L1 for each."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.issuer import AUDIENCE, TestIssuer, rsa_key
from tests.fakes.server_process import ServerProcess
from tests.fakes.tenants import BLOCKS, check_apart, hits

from kvpool.model.identity import Mode
from kvpool.model.reasons import UncachedReason
from kvpool.server.keys import make_key

SIZE_BYTES = 64 << 20
SHARE = 0.25


@dataclass
class Pool:
    """The server, and engines whose pods are of several namespaces."""

    folder: Path
    issuer: TestIssuer
    server: ServerProcess
    public: str

    def engine(self, namespace: str, mode: Mode, **claims: Any) -> FakeEngine:
        file = self.folder / f"token-{os.urandom(4).hex()}"
        now = time.time()  # noqa: TID251 - the server's own clock judges it
        file.write_text(self.issuer.token(namespace=namespace, now=now, **claims))
        tcp = next(a for a in self.server.endpoints if a.startswith("tcp://"))
        address = self.server.address if mode is Mode.CLIENT_MOVED else tcp
        return FakeEngine(address, mode, blocks=BLOCKS, token_file=str(file), server_key=self.public)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    issuer, public = TestIssuer(tmp_path), make_key(str(tmp_path / "key"))
    server = ServerProcess(
        tmp_path,
        size_bytes=SIZE_BYTES,
        listen={"tcp_host": "127.0.0.1", "tcp_port": 0, "curve_key_file": str(tmp_path / "key")},
        l1={"quotas": {"team-a": SHARE, "team-b": SHARE}, "segment_bytes": 2 << 20},
        auth={
            "kind": "token",
            "issuers": [{"issuer": issuer.issuer, "keys_file": issuer.keys_file}],
            "audience": AUDIENCE,
            "namespaces": ["team-a", "team-b"],
        },
    )
    with server:
        until(lambda: server.endpoints, 30)
        yield Pool(tmp_path, issuer, server, public)


@pytest.mark.behaviour("D050")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.CLIENT_MOVED])
def test_a_tenant_neither_reads_nor_clears_nor_fills_what_is_anothers(pool: Pool, mode: Mode) -> None:
    with pool.engine("team-a", mode) as mine, pool.engine("team-b", mode) as theirs:
        mine.healthy()
        theirs.healthy()

        check_apart(mine, theirs, int(SHARE * SIZE_BYTES))


@pytest.mark.timeout(60)
def test_nobody_becomes_the_other_tenant_by_saying_so(pool: Pool) -> None:
    """A label, a forged token and a token of a namespace that is not let in say the right name and are not believed."""
    keys = digests(3)
    with pool.engine("team-a", Mode.STREAMED) as mine:
        mine.healthy()
        mine.store(keys)
    pool.issuer.keys["rsa-1"] = rsa_key("another")
    forged = pool.engine("team-a", Mode.STREAMED)
    pool.issuer.keys["rsa-1"] = rsa_key("rsa-1")
    stranger = pool.engine("team-c", Mode.STREAMED, sub="system:serviceaccount:team-a:default")
    with forged, stranger, pool.engine("team-b", Mode.STREAMED) as theirs:
        for engine in (forged, stranger):
            until(lambda engine=engine: engine.scheduler_link.state.reason is UncachedReason.IDENTITY)
        theirs.healthy()
        assert hits(theirs, keys) == 0
