# SPDX-License-Identifier: Apache-2.0
"""A real server in a mounted folder whose namespaces, tenants and log level change while engines are connected."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clients import FakeEngine, digests, until
from tests.fakes.issuer import AUDIENCE, TestIssuer, rsa_key
from tests.fakes.server_process import ServerProcess
from tests.integration.test_live_config import status_of

from kvpool.model.identity import Mode
from kvpool.model.reasons import UncachedReason

NAMESPACES = ["team-a", "team-b"]
PATIENCE_S = 20


class Mounted(ServerProcess):
    """Its configuration lies as the kubelet puts a ConfigMap: links into a folder that is replaced as a whole."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        super().__init__(folder, **sections)
        self._versions = 0

    def mount(self, **files: str) -> None:
        """Put *files* (names without suffix) in the place of the former ones."""
        self._versions += 1
        fresh = self.folder / f"..version-{self._versions}"
        fresh.mkdir()
        for name, text in files.items():
            (fresh / f"{name}.json").write_text(text)
            link = self.folder / f"{name}.json"
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(f"..data/{name}.json")
        (self.folder / "..fresh").symlink_to(fresh.name)
        (self.folder / "..fresh").rename(self.folder / "..data")


class Scene:
    """The server, its issuer, and engines of several namespaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.issuer = TestIssuer(folder)
        self.server = Mounted(
            folder,
            l1={"size_bytes": 32 << 20},
            http={"operations_host": "127.0.0.1", "operations_port": 0},
            auth={
                "kind": "token",
                "issuers": [{"issuer": self.issuer.issuer, "keys_file": str(folder / "keys.json")}],
                "audience": AUDIENCE,
                "namespaces": NAMESPACES,
            },
        )
        self._followed = 0

    def change(self, keys: str | None = None, log_level: str = "info", **auth: Any) -> list[str]:
        """Mount other values and wait until the server says that it follows them; returns what needs a restart."""
        self.server.config["auth"] |= auth
        self.server.config["log"] = {"level": log_level}
        self.server.mount(server=json.dumps(self.server.config), keys=keys or (self.folder / "keys.json").read_text())
        self._followed += 1
        lines = until(lambda: (found := self._said())[self._followed - 1 :] and found, PATIENCE_S)
        assert isinstance(lines, list)
        return list(json.loads(lines[-1])["restart"])

    def _said(self) -> list[str]:
        return [line for line in self.server.log.splitlines() if "config.followed" in line]

    def boot(self) -> str:
        return str(status_of(self.server.operations)["boot_id"])

    def engine(self, namespace: str, **claims: Any) -> FakeEngine:
        """An engine whose pod is of *namespace*."""
        token = self.folder / f"token-{namespace}"
        now = time.time()  # noqa: TID251 - the server's own clock judges it
        token.write_text(self.issuer.token(namespace=namespace, now=now, **claims))
        return FakeEngine(self.server.address, Mode.STREAMED, token_file=str(token))

    def sees(self, engine: FakeEngine, keys: bytes) -> int:
        return int(engine.lookup(keys, os.urandom(4).hex()).chunks)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with made.server:
        until(lambda: made.server.endpoints, 30)
        yield made


def refused(engine: FakeEngine) -> bool:
    return all(link.state.reason is UncachedReason.IDENTITY for link in (engine.worker_link, engine.scheduler_link))


@pytest.mark.behaviour("D041")
def test_a_namespace_is_let_in_and_out_without_a_restart_and_nobody_else_notices(scene: Scene) -> None:
    boot = scene.boot()
    with scene.engine("team-a") as mine, scene.engine("team-c") as other:
        mine.healthy()
        epoch = mine.worker_link.state.epoch
        until(lambda: refused(other), PATIENCE_S)
        assert "does not admit" in other.worker_link.state.detail

        assert scene.change(namespaces=[*NAMESPACES, "team-c"]) == []
        other.healthy(PATIENCE_S)
        keys = digests(4, "other")
        other.store(keys)
        until(lambda: scene.sees(other, keys) == 4)

        scene.change(namespaces=NAMESPACES)

        until(lambda: refused(other), PATIENCE_S)
        assert mine.worker_link.state.epoch == epoch, "who is still welcome keeps its session"
        assert mine.worker_link.state.healthy
    assert scene.boot() == boot


@pytest.mark.behaviour("D041", "D050")
def test_a_namespace_moves_to_another_tenant_and_sees_what_is_that_ones_alone(scene: Scene) -> None:
    keys = digests(4, "a")
    with scene.engine("team-a") as a, scene.engine("team-b") as b:
        a.healthy()
        b.healthy()
        a.store(keys)
        until(lambda: scene.sees(a, keys) == 4)
        assert scene.sees(b, keys) == 0
        epoch = a.worker_link.state.epoch

        assert scene.change(tenants={"team-b": "team-a"}) == []

        until(lambda: b.healthy(PATIENCE_S) and tenants_of(b) == {"team-a"}, PATIENCE_S)
        assert scene.sees(b, keys) == 4
        assert a.worker_link.state.epoch == epoch

        scene.change(tenants={})

        until(lambda: b.healthy(PATIENCE_S) and tenants_of(b) == {"team-b"}, PATIENCE_S)
        assert scene.sees(b, keys) == 0


def tenants_of(engine: FakeEngine) -> set[str]:
    links = (engine.worker_link, engine.scheduler_link)
    return {link.state.welcome.tenant for link in links if link.state.healthy and link.state.welcome}


def test_a_load_under_way_ends_well_or_as_a_miss_when_its_tenant_changes(scene: Scene) -> None:
    keys = digests(8, "a")
    with scene.engine("team-a") as a:
        a.healthy()
        a.blocks.fill(7)
        a.store(keys)
        until(lambda: scene.sees(a, keys) == 8)
        answer = a.lookup(keys)
        job = a.begin_load(answer, 128)

        scene.change(tenants={"team-a": "elsewhere"})

        until(lambda: a.poll() and a.loaded, PATIENCE_S)
        bad = a.loaded[-1][1]
        wanted = a.bytes_of(0, 8)
        for block, (got, expected) in enumerate(zip(a.bytes_of(128, 8), wanted, strict=True), 128):
            assert block in bad or (got == expected).all()
        assert job.end == 8
        until(lambda: a.healthy(PATIENCE_S) and tenants_of(a) == {"elsewhere"}, PATIENCE_S)
        assert scene.sees(a, keys) == 0


def test_another_kind_of_identity_waits_for_the_next_start_and_opens_no_door(scene: Scene) -> None:
    """The file of a pool without tokens lists no namespaces, which a running server must not take for all."""
    with scene.engine("team-c") as stranger:
        until(lambda: refused(stranger), PATIENCE_S)

        assert "auth.kind" in scene.change(kind="none", namespaces=[], issuers=[], audience="")
        threading.Event().wait(0.5)
        assert refused(stranger)


def test_the_log_level_follows(scene: Scene) -> None:
    with scene.engine("team-a") as a:
        a.healthy()
        assert "request.served" not in scene.server.log

        assert scene.change(log_level="debug") == []

        until(lambda: "request.served" in scene.server.log, PATIENCE_S)
        scene.server.config["log"] = {"level": "error"}
        scene.server.mount(server=json.dumps(scene.server.config), keys=(scene.folder / "keys.json").read_text())
        keys = digests(2, "quiet")

        def quiet() -> bool:
            before = scene.server.log
            a.store(keys)
            scene.sees(a, keys)
            return scene.server.log == before

        until(quiet, PATIENCE_S)


def test_the_issuers_new_keys_are_taken_from_the_mounted_file(scene: Scene) -> None:
    """A cluster rotates its signing key: no server has to start anew for it."""
    scene.change()
    scene.issuer.keys = {"rsa-2": rsa_key("rsa-2")}
    with scene.engine("team-a", kid="rsa-2") as a:
        until(lambda: refused(a), PATIENCE_S)
        keys_file = Path(scene.issuer.keys_file)
        scene.issuer.keys_file = str(scene.folder / "published")
        scene.issuer.publish()

        scene.server.mount(server=json.dumps(scene.server.config), keys=(scene.folder / "published").read_text())

        a.healthy(PATIENCE_S)
        assert keys_file.is_symlink()
