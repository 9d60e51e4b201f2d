# SPDX-License-Identifier: Apache-2.0
"""One release of skew, both ways: the frozen wheel (``make freeze``) against the present code, in real processes."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.fakes.clients import until
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_process import ROOT, ServerProcess
from tests.fakes.skew_client import CHUNKS, SHARD_BYTES

from kvpool.cli.connect import listening_problem
from kvpool.model.errors import VersionMismatch
from kvpool.wire import messages as m

FROZEN = ROOT / "tests" / "golden" / "frozen"
NOW = "now"
BEFORE = "before"
ALL_BYTES = CHUNKS * SHARD_BYTES


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> dict[str, Path]:
    """Return where each release's packages lie."""
    (wheel,) = FROZEN.glob("kvpool-*.whl")
    folder = tmp_path_factory.mktemp("frozen")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {NOW: ROOT / "cacheserver", BEFORE: folder}


def python(path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run python with one release before everything else that is installed."""
    environ = os.environ | {"PYTHONPATH": f"{path}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=60
    )


def client(path: Path, what: str, address: str, mode: str = "streamed", seed: int = 0):
    """Return what a client of one release said, and its log lines."""
    done = python(path, "-m", "tests.fakes.skew_client", what, address, mode, str(seed))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["code"] == str(path), "the other release was imported"
    return said, done.stderr.splitlines()


@pytest.mark.behaviour("D047", "D083")
@pytest.mark.parametrize("release", [NOW, BEFORE])
def test_clients_of_both_releases_share_a_server_of_either(tmp_path, code, release):
    with ServerProcess(tmp_path, code=code[release]) as server:
        until(lambda: not listening_problem(server.address), 30)
        for seed, (writer, reader, mode) in enumerate([(NOW, BEFORE, "client-moved"), (BEFORE, NOW, "streamed")]):
            client(code[writer], "store", server.address, mode, seed)
            said, _ = client(code[reader], "load", server.address, mode, seed)

            assert said["compared"] == ALL_BYTES


@pytest.mark.parametrize(("first", "second"), [(BEFORE, NOW), (NOW, BEFORE)], ids=["update", "rollback"])
def test_a_cache_outlives_an_update_and_a_rollback(tmp_path, code, first, second):
    before = ServerProcess(tmp_path, code=code[first])
    with before:
        until(lambda: not listening_problem(before.address), 30)
        client(code[first], "store", before.address)
    with ServerProcess(tmp_path, code=code[second]) as after:
        until(lambda: not listening_problem(after.address), 30)
        said, _ = client(code[second], "load", after.address)

    assert said["compared"] == ALL_BYTES


@pytest.mark.behaviour("D067")
@pytest.mark.parametrize("release", [NOW, BEFORE])
def test_a_version_out_of_range_means_uncached_and_one_line(tmp_path, code, release):
    with ScriptedServer(tmp_path) as server:
        server.fail(m.Hello, VersionMismatch("this server speaks protocol 8 to 9, the client 1 to 1"), times=1000)

        said, lines = client(code[release], "watch", server.address)

        assert len(server.of(m.Hello)) > 2, "it tried again and again"
    assert said == {"healthy": False, "reason": "version", "code": str(code[release])}
    assert [line.split(" ", 1)[0] for line in lines if "protocol 8 to 9" in line] == ["WARNING"]


def test_frames_of_the_frozen_release_still_decode(code):
    frames = json.loads((FROZEN / "frames.json").read_text())

    assert decoded(code[NOW], frames) == list(frames)


def test_frames_of_the_present_release_decode_in_the_frozen_one(code):
    """But for messages that it does not have: it answers those with UnknownRequest and goes on."""
    frozen = json.loads((FROZEN / "frames.json").read_text())
    now = json.loads((ROOT / "tests/golden/frames/protocol-1.json").read_text())
    both = {name: frame for name, frame in now.items() if name in frozen}

    assert set(frozen) <= set(now), "a message of a release is never removed"
    assert decoded(code[BEFORE], both) == list(both)


def decoded(path: Path, frames: dict[str, str]) -> list[str]:
    """Return the names of those frames that a release's own codec reads as the message that they are."""
    done = python(path, "-c", _DECODE, json.dumps(frames))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


_DECODE = """
import json, sys
import msgspec
from kvpool.wire import descriptors as d, messages as m
kinds = {"request": m.AnyRequest, "reply": m.AnyReply, "descriptor": d.AnyDescriptorRequest | d.AnyDescriptorReply}
read = []
for name, frame in json.loads(sys.argv[1]).items():
    first, _, tag = name.partition(" ")
    kind = {"envelope": m.Envelope, "reply envelope": m.ReplyEnvelope}.get(name) or kinds[first]
    message = msgspec.msgpack.decode(bytes.fromhex(frame), type=kind)
    if name in ("envelope", "reply envelope") or type(message).__struct_config__.tag == tag:
        read.append(name)
print(json.dumps(read))
"""
