# SPDX-License-Identifier: Apache-2.0
"""The machines that nodes run on, by themselves: apart from the host, gone without a trace, swept after a crash."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.processes import Processes, sweep, wait_for
from tests.e2e import dns
from tests.e2e.machine import HIERARCHIES, Machine, entered, link, missing_capability, remove_groups, stale_groups
from tools import node_images

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("E2E_PROVIDER") == "existing":
        pytest.skip("the nodes are somebody else's")
    if reason := missing_capability():
        if os.environ.get("KVPOOL_EXPECT_NODES"):
            pytest.fail(reason)
        pytest.skip(reason)
    file = tmp_path_factory.mktemp("pause") / "pause"
    node_images.build_pause(file)
    return file


@pytest.fixture
def pair(pause: Path, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    processes = Processes(tmp_path / "run-a")
    machines = Machine(processes, "node-1", pause), Machine(processes, "node-2", pause)
    try:
        for machine in machines:
            machine.start()
        yield machines
    finally:
        for machine in machines:
            machine.stop()


def groups_of(run: Path) -> list[Path]:
    return [g for g in HIERARCHIES.glob("*/kvpool-*") if f"-{run.name}-node-" in g.name]


def test_a_machine_has_its_own_folders_and_processes(pair: tuple[Machine, Machine]) -> None:
    first, second = pair
    for machine in pair:
        machine.run("sh", "-c", "mkdir /run/kvpool && echo here > /dev/shm/x")
    first.run("rm", "/dev/shm/x")

    assert second.run("cat", "/dev/shm/x") == "here\n"
    assert not Path("/dev/shm/x").exists()
    assert first.run("readlink", "/proc/self/ns/pid") != second.run("readlink", "/proc/self/ns/pid")
    assert f"/{first.group}/runtime" in first.run("cat", "/proc/self/cgroup")


def test_settings_of_the_hosts_kernel_are_out_of_reach(pair: tuple[Machine, Machine]) -> None:
    panic = Path("/proc/sys/kernel/panic")
    before = panic.read_text()

    pair[0].run("sh", "-c", "echo 7 > /proc/sys/kernel/panic")  # what a kubelet does
    assert panic.read_text() == before
    with pytest.raises(AssertionError, match="Read-only"):
        pair[0].run("sh", "-c", "cat /proc/sys/kernel/pid_max > /proc/sys/kernel/pid_max")


def test_linked_machines_talk_and_nobody_else_does(pair: tuple[Machine, Machine]) -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    link(*pair, ("192.0.2.11/24", "192.0.2.12/24"))
    code = "import socket; s = socket.create_server(('192.0.2.12', 7000)); s.accept()[0].sendall(b'hello')"
    server = subprocess.Popen(pair[1].inside(sys.executable, "-c", code))
    ask = "import socket, sys; print(socket.create_connection(('192.0.2.12', 7000), 5).recv(9))"

    def answered() -> bool:
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=False)
        return done.stdout == b"b'hello'\n"

    with entered(pair[0].network):
        wait_for("the other machine", answered, 10)
    assert server.wait(10) == 0
    assert Path("/proc/thread-self/ns/net").readlink() == before


def test_nothing_stays_behind(pause: Path, tmp_path: Path) -> None:
    processes = Processes(tmp_path / "run-b")
    machine = Machine(processes, "node-1", pause)
    machine.start()
    with subprocess.Popen(machine.inside("sleep", "1000"), start_new_session=True):
        wait_for("a process", lambda: "sleep" in machine.run("ps", "ax"), 10)
        init = machine.init
        machine.stop()

    assert not Path(f"/proc/{init}").exists()
    assert groups_of(processes.folder) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_what_a_killed_run_left_is_swept_and_what_a_living_one_has_is_not(
    pair: tuple[Machine, Machine], pause: Path, tmp_path: Path
) -> None:
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom tests.cluster.processes import Processes\n"
        "from tests.e2e.machine import Machine\n"
        "made = Machine(Processes(Path(sys.argv[1])), 'node-1', Path(sys.argv[2]))\n"
        "made.start()\nprint(made.init, flush=True)\nsignal.pause()"
    )
    dead = tmp_path / "run-dead"
    with subprocess.Popen(
        [sys.executable, "-c", code, dead, pause], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        init = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)

    assert sweep(tmp_path) == [dead]
    for group in stale_groups(tmp_path):
        remove_groups(group)

    wait_for("the machine's end", lambda: not Path(f"/proc/{init}").exists(), 10)
    assert groups_of(dead) == []
    assert not dead.exists()
    assert pair[0].run("echo", "alive") == "alive\n"


@pytest.mark.parametrize(
    ("name", "kind", "code", "answers"),
    [
        ("a.b.svc.cluster.local", 1, 0, 1),
        ("a.b.svc.cluster.local", 28, 0, 0),
        ("a.b.svc", 1, 3, 0),
    ],
    ids=["known", "another kind", "unknown"],
)
def test_names_of_services(name: str, kind: int, code: int, answers: int) -> None:
    class Known(dns.Services):
        def __init__(self) -> None:
            pass

        def addresses(self, name: str) -> list[str] | None:
            return ["203.0.113.7"] if name == "a.b.svc.cluster.local" else None

    parts = b"".join(bytes([len(p)]) + p.encode() for p in name.split("."))
    question = parts + b"\0" + struct.pack(">HH", kind, 1)
    found = dns.reply(struct.pack(">HHHHHH", 77, 0x0100, 1, 0, 0, 0) + question, Known())

    identity, flags, questions, count, _, _ = struct.unpack_from(">HHHHHH", found)
    assert (identity, flags & 0xF, questions, count) == (77, code, 1, answers)
    assert found[12 : 12 + len(question)] == question
    assert found.endswith(bytes([203, 0, 113, 7])) == bool(answers)
