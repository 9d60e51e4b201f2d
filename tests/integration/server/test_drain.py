# SPDX-License-Identifier: Apache-2.0
"""The end of a server: new work is refused, old work ends, all is answered; and what cannot start says why."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.fakes.raw_client import RawClient
from tests.fakes.running_server import END_S, running_server, server_config

from kvpool.config import AuthConfig, AuthKind, HttpConfig, ListenConfig, render
from kvpool.server.compose import run_server
from kvpool.server.keys import make_key
from kvpool.wire import messages as m

ROOT = Path(__file__).parents[3]
SHARD = 8192


@pytest.mark.behaviour("D035")
def test_a_draining_server_ends_old_work_and_refuses_new(tmp_path):
    with running_server(tmp_path, drain_s=5.0) as server, server.connect() as c, server.connect() as bulk:
        store_id = os.urandom(16)
        ticket = c.welcome().ticket
        c.register(SHARD)
        bulk.ask(m.AttachBulk(ticket=ticket))
        c.ask(m.PrepareStore(request_id="r", store_id=store_id), os.urandom(32))
        server.server.request_stop()
        while not c.ask(m.Stats())[0].draining:
            pass

        assert not c.ask(m.Stats())[0].ready
        assert c.ask(m.Ping())[0].draining
        assert c.refusal(m.Lookup(request_id="l", lookup_id=os.urandom(16)), bytes(32)).code == "draining"
        assert c.refusal(m.PrepareStore(request_id="s", store_id=os.urandom(16)), bytes(32)).code == "draining"
        with server.connect() as late:
            assert late.refusal(late.hello()).code == "draining"
        bulk.ask(m.WriteChunk(store_id=store_id, chunk=0, offset=0), bytes(SHARD))
        assert c.ask(m.CommitStore(store_id=store_id), b"\1", bytes(16))[0].stored == 1


@pytest.mark.behaviour("D045", "D055")
def test_what_waits_when_the_time_is_over_is_answered(tmp_path):
    with running_server(tmp_path, drain_s=0.2) as server, server.connect() as c, server.connect() as writer:
        digest, lookup_id = os.urandom(32), os.urandom(16)
        for client in (c, writer):
            client.welcome()
            client.register(SHARD)
        writer.ask(m.PrepareStore(request_id="w", store_id=os.urandom(16)), digest)
        assert c.ask(m.Lookup(request_id="r", lookup_id=lookup_id), digest)[0].coming == 1
        c.send(m.LookupStatus(lookup_id=lookup_id, wait_s=60), deadline_ms=60_000)
        server.server.request_stop()

        assert c.receive()[1].code == "draining"


def test_questions_to_a_server_that_ended_are_refused(tmp_path):
    with running_server(tmp_path) as server:
        pass

    with pytest.raises(Exception, match="shutting down"):
        server.ask(lambda: None)


class Process:
    """`run_server` in a process of its own."""

    def __init__(self, folder, **changes):
        self.config = server_config(folder, http=HttpConfig(operations_port=0), **changes)
        env = os.environ | {"PYTHONPATH": str(ROOT / "cacheserver")}
        code = "import sys; from kvpool.config import decode_server; from kvpool.server.compose import run_server; "
        code += "sys.exit(run_server(decode_server(sys.stdin.buffer.read(), {})))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.process.stdin.write(render(self.config))
        self.process.stdin.close()
        self.log = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def wait_for(self, event):
        """Read the log up to the line of *event* and return that line."""
        for line in self.process.stderr:
            self.log.append(line.decode())
            if f'"{event}"' in self.log[-1]:
                return self.log[-1]
        raise AssertionError(f"no {event} in the log: {''.join(self.log)}")

    def end(self):
        """Wait for the end; returns (exit code, rest of the log)."""
        rest = self.process.stderr.read().decode()
        return self.process.wait(END_S), rest

    @property
    def address(self):
        return f"ipc://{self.config.listen.socket_path}"


@pytest.mark.slow
@pytest.mark.behaviour("R008", "R067", "D115")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_0_within_5_s(tmp_path, number):
    with Process(tmp_path, drain_s=3.0) as server, RawClient(server.address) as c:
        ready = server.wait_for("server.ready")
        assert '"recovered_chunks": 0' in ready
        assert str(server.config.l1.size_bytes) in ready
        assert re.search('"boot_id": "[0-9a-f]{32}"', ready)
        c.welcome()
        c.register(SHARD)
        # Work that never ends must not hold the process up.
        c.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), bytes(32))
        cut = threading.Timer(5, server.process.kill)
        cut.start()
        server.process.send_signal(number)

        code, rest = server.end()

        cut.cancel()
        assert code == 0, rest
        assert "server.stopped" in rest
        assert not Path(server.config.listen.socket_path + ".fd").exists()


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path):
    with Process(tmp_path, drain_s=60.0) as server, RawClient(server.address) as c:
        server.wait_for("server.ready")
        c.welcome()
        c.register(SHARD)
        c.ask(m.PrepareStore(request_id="r", store_id=bytes(16)), bytes(32))
        server.process.terminate()
        server.wait_for("server.draining")
        server.process.terminate()

        assert server.end()[0] == 1


@pytest.mark.slow
@pytest.mark.behaviour("D042")
def test_a_defect_in_the_loop_ends_the_process_loudly(tmp_path):
    code = (
        "import sys\n"
        "from kvpool.config import decode_server\n"
        "from kvpool.server import compose\n"
        "class Broken(compose.Engine):\n"
        "    def tick(self, now_s):\n"
        "        raise RuntimeError('planted')\n"
        "compose.Engine = Broken\n"
        "compose.run_server(decode_server(sys.stdin.buffer.read(), {}))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "cacheserver")}

    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=env,
        input=render(server_config(tmp_path)),
        capture_output=True,
        timeout=30,
    )

    assert done.returncode != 0
    assert b"loop.crashed" in done.stderr
    assert b"planted" in done.stderr


@pytest.fixture
def quiet(monkeypatch):
    """Keep `run_server` from setting up the log of this process and its signals."""
    monkeypatch.setattr("kvpool.server.compose.configure", lambda *_: None)


def not_started(config):
    with capture_logs() as logs:
        assert run_server(config) == 1
    (line,) = [entry for entry in logs if entry["event"] == "server.not_started"]
    return line["error"]


def test_two_servers_on_one_socket(tmp_path, quiet):
    with running_server(tmp_path) as server:
        other = server_config(tmp_path / "other", listen=server.config.listen)
        (tmp_path / "other").mkdir()

        error = not_started(other)

        assert "another server listens" in error
        assert server.config.listen.socket_path in error
        with server.connect() as c:
            assert c.welcome()


def test_a_socket_that_somebody_else_listens_on_is_not_taken(tmp_path, quiet):
    config = server_config(tmp_path)
    path = Path(config.listen.socket_path)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()

        assert "another server listens" in not_started(config)
        assert path.exists()


def test_a_leftover_socket_is_replaced(tmp_path):
    config = server_config(tmp_path)
    for path in (Path(config.listen.socket_path), Path(config.listen.socket_path + ".fd")):
        path.parent.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))

    with running_server(tmp_path) as server, server.connect() as c:
        assert c.welcome()


def test_what_is_no_socket_is_never_removed(tmp_path, quiet):
    config = server_config(tmp_path)
    path = Path(config.listen.socket_path)
    path.parent.mkdir()
    path.write_text("precious")

    assert "is no socket" in not_started(config)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(("mode", "folder"), [(0o600, 0o700), (0o660, 0o770)])
def test_sockets_have_the_configured_mode_and_a_new_folder_fits_it(tmp_path, mode, folder):
    listen = ListenConfig(socket_path=str(tmp_path / "new" / "deep" / "kvpool.sock"), socket_mode=mode)
    with running_server(tmp_path, listen=listen):
        for path in (listen.socket_path, listen.socket_path + ".fd"):
            assert stat.S_IMODE(Path(path).stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "new" / "deep").stat().st_mode) == folder


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path, quiet):
    (tmp_path / "file").write_text("")
    listen = ListenConfig(socket_path=str(tmp_path / "file" / "kvpool.sock"))

    error = not_started(server_config(tmp_path, listen=listen))

    assert "listen.socket_path" in error
    assert "name another path" in error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auth": AuthConfig(kind=AuthKind.SECRET, secret_file="gone")}, ("gone", "mount the file")),
        ({"http": HttpConfig(operations_host="192.0.2.1", operations_port=1)}, ("http.operations_host",)),
        ({"http": HttpConfig(operations_host="", admin_socket="missing/admin.sock")}, ("http.admin_socket",)),
    ],
)
def test_what_cannot_start_names_setting_and_remedy(tmp_path, quiet, changes, words):
    error = not_started(server_config(tmp_path, **changes))

    assert all(word in error for word in words), error


def test_a_tcp_port_that_is_taken(tmp_path, quiet):
    key = tmp_path / "key"
    make_key(str(key))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = ListenConfig(
            socket_path="", tcp_host="127.0.0.1", tcp_port=taken.getsockname()[1], curve_key_file=str(key)
        )

        assert "listen.tcp_port" in not_started(server_config(tmp_path, listen=listen))
