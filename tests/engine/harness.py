# SPDX-License-Identifier: Apache-2.0
"""Real processes for tests: vLLM engines (offline or behind HTTP) and kvpool servers.

Each is started in its own process group, which is ended as a whole; each wait has a deadline; what a process wrote is
in a file of the test's folder, and its end is part of every failure's message.
"""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec
from tests.engine.nursery import Forked, forked
from tools.vllm_env import chosen_version

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model.identity import ClientKind
from kvpool.server.keys import make_key
from kvpool.wire.messages import Statistics, Stats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE = float(os.environ.get("KVPOOL_TEST_PATIENCE", "1"))
"""Multiplies all deadlines, for a machine that has other work."""

START_S, ANSWER_S, STOP_S = 150.0 * PATIENCE, 100.0 * PATIENCE, 15.0
MIB = 1 << 20
SHM = Path("/dev/shm")


def until(condition: Callable[[], object], timeout_s: float, what: str) -> object:
    """Wait for *condition*; returns its value."""
    ends_s, pause = monotonic() + timeout_s, threading.Event()
    while not (value := condition()):
        assert monotonic() < ends_s, f"{what} did not happen within {timeout_s} s"
        pause.wait(0.02)
    return value


def sweep(shm: Path = SHM) -> None:
    """Remove the memory of servers whose tests were killed; the number in its name is the tests' process."""
    for left in shm.glob("kvpool-test-*-*"):
        owner = left.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)


class Node:
    """A network namespace with one address, as a machine of its own; ``Nodes`` makes them."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, command: list[str]) -> list[str]:
        """Return *command* as it runs there."""
        return ["ip", "netns", "exec", self.name, *command]


class Nodes:
    """Network namespaces that reach each other, and are reached from here, over a bridge; a context manager."""

    _numbers = itertools.count()

    def __init__(self, count: int) -> None:
        number = next(self._numbers)
        self._bridge = f"kvp{os.getpid() % 100000}b{number}"
        self._network = f"10.{os.getpid() % 250}.{number}"
        self.nodes = [Node(f"{self._bridge}n{n}", f"{self._network}.{n + 1}") for n in range(count)]

    @staticmethod
    def allowed() -> bool:
        """True if this process may make network namespaces."""
        if os.geteuid() or shutil.which("ip") is None:
            return False
        name = f"kvp{os.getpid()}try"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
        if made:
            subprocess.run(["ip", "netns", "del", name], check=True)
        return made

    def __enter__(self) -> list[Node]:
        try:
            self._run("link", "add", self._bridge, "type", "bridge")
            self._run("address", "add", f"{self._network}.254/24", "dev", self._bridge)
            self._run("link", "set", self._bridge, "up")
            for number, node in enumerate(self.nodes):
                self._run("netns", "add", node.name)
                end = f"{self._bridge}e{number}"[:15]
                self._run("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", node.name)
                self._run("link", "set", end, "master", self._bridge, "up")
                inside = ("-netns", node.name)
                self._run(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")
                self._run(*inside, "link", "set", "eth0", "up")
                self._run(*inside, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self.nodes

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


class Group:
    """A process group with a log file."""

    def __init__(self, process: subprocess.Popen | Forked, log: Path) -> None:
        self.process = process
        self.log = log
        self._ended = False

    @classmethod
    def of(cls, command: list[str], environ: dict[str, str], log: Path, **pipes: object) -> "Group":
        """Start *command* as a group of its own."""
        with log.open("ab") as out:
            pipes.setdefault("stdout", out)
            return cls(
                subprocess.Popen(
                    command, env=os.environ | environ, stderr=out, start_new_session=True, cwd=log.parent, **pipes
                ),
                log,
            )

    def tail(self, lines: int = 40) -> str:
        """The end of the log, for a failure's message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def alive(self) -> bool:
        return self.process.poll() is None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, first: int = signal.SIGTERM) -> None:
        """Ask the first process to end and its helpers with it; in the end, end the group by force. Idempotent."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Pool:
    """What all servers of one pool share, and their clients on other nodes need."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_text("of this test alone\n")
        self.secret.chmod(0o600)
        self.key = folder / "key"
        self.client = {"server_key": make_key(str(self.key)), "secret_file": str(self.secret)}


class Server:
    """A kvpool server in a process of its own, at one address, started as often as a test likes."""

    def __init__(
        self,
        folder: Path,
        *,
        size_bytes: int = 512 * MIB,
        chunk_tokens: int = 256,
        node: Node | None = None,
        pool: "Pool | None" = None,
    ) -> None:
        """Make it; on a *node* its address is the node's, and it has the key and the secret of its *pool*."""
        self.folder = folder
        self.node = node
        self.socket = folder / "kv.sock"
        self.address = f"ipc://{self.socket}"
        sweep()
        self.memory = SHM / f"kvpool-test-{os.getpid()}-{folder.name}"
        self._group: Group | None = None
        self._probe: Link | None = None
        self._config = folder / "server.json"
        config = {
            "listen": {"socket_path": str(self.socket)},
            "l1": {"size_bytes": size_bytes, "directory": str(self.memory)},
            "http": {"operations_host": ""},
            "chunk_tokens": chunk_tokens,
            "server_id": folder.name,
        }
        self._credentials: dict[str, str] = {}
        if node is not None and pool is not None:
            self.address = f"tcp://{node.address}:7410"
            self._credentials = {"secret_file": str(pool.secret)}
            config["listen"] |= {"tcp_host": node.address, "tcp_port": 7410, "curve_key_file": str(pool.key)}
            config["auth"] = {"kind": "secret", **self._credentials}
        self._config.write_text(json.dumps(config))

    def start(self) -> "Server":
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "kvpool.cli.main", "server", "--config", str(self._config)]
        command = self.node.command(command) if self.node is not None else command
        self._group = Group.of(command, {"PYTHONPATH": str(ROOT / "cacheserver")}, self.folder / "server.log")
        if self._probe is None:
            self._probe = Link(ClientConfig(server=f"ipc://{self.socket}", **self._credentials), ClientKind.PROBE)
            self._probe.start()
        assert self._probe.wait_healthy(START_S), self._group.tail()
        return self

    @property
    def running(self) -> bool:
        """True between ``start`` and its end."""
        return self._group is not None

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def statistics(self) -> Statistics:
        assert self._probe is not None
        assert self._probe.wait_healthy(START_S), "the server does not answer"
        return self._probe.call(Stats())[0]

    def wait_chunks(self, at_least: int) -> None:
        """Wait until that many chunks are stored."""
        until(lambda: self.statistics().chunks >= at_least, 30, f"{at_least} chunks stored")

    def wait_no_leases(self) -> None:
        until(lambda: self.statistics().leases == 0, 30, "the end of all leases")

    def close(self) -> None:
        """End it and remove its memory."""
        if self._probe is not None:
            self._probe.close()
        if self._group is not None:
            self.stop()
        shutil.rmtree(self.memory, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self._group is not None:
            self._group.end(number)
            self._group = None


@contextmanager
def server(folder: Path, **options: object) -> Iterator[Server]:
    """A running server."""
    running = Server(folder, **options)
    try:
        yield running.start()
    finally:
        running.close()


def connector(server_address: str, *, role: str = "kv_both", policy: str = "recompute", **extra: object) -> dict:
    """Engine option that makes it use a server."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.connector.facade",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        # A busy machine may starve a thread for longer than an engine in production should wait for a lookup, and
        # measures at random.
        "kv_connector_extra_config": {
            "server": server_address,
            "lookup_s": 10,
            "request_s": 10,
            "load_budget": 0,
            **extra,
        },
    }


def engine_environ(threads: str = "0-1") -> dict[str, str]:
    """Environment of every engine of the tests: offline, same threads everywhere (other threads, other tokens).

    Args:
        threads: cores of each rank, as vLLM's variable has them.
    """
    return {
        "PYTHONPATH": str(ROOT / "cacheserver"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Engine:
    """An offline engine; ``generate`` and the others talk to it, one command at a time."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        model: Path,
        *,
        workers: bool = False,
        threads: str = "0-1",
        **options: object,
    ) -> None:
        """Start it.

        Args:
            python: of the engine's environment.
            folder: where its log goes.
            model: the model's folder.
            workers: with separate scheduler and worker processes, as in production; slower to start.
            threads: cores of each rank.
            options: for ``vllm.LLM``, and what ``engine_worker`` adds.
        """
        environ = engine_environ(threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(workers))}
        log = folder / f"engine-{monotonic():.6f}.log"
        child = None if workers else forked(python, environ, log, START_S)
        if child is not None:
            self._group = Group(child, log)
        else:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._group = Group.of([str(python), str(HERE / "engine_worker.py")], environ, log, **pipes)
        self._buffer = b""
        defaults = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4608,
            "max_num_batched_tokens": 4608,
            "kv_cache_memory_bytes": 256 * MIB,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self._send({k: v for k, v in (defaults | options).items() if v is not None})

    def ready(self) -> "Engine":
        """Wait until it can take commands."""
        assert self._receive(START_S) == "ready"
        return self

    def failed_to_start(self) -> str:
        """Wait for the end of an engine that must not start; returns its log."""
        self._group.process.wait(START_S)
        return self._group.log.read_text(errors="replace")

    def begin(self, prompts: list, *, max_tokens: int = 8, **fields: object) -> None:
        """Send prompts (lists of token ids); ``end`` takes the answer.

        Args:
            prompts: the prompts.
            max_tokens: how many tokens each answer has.
            fields: of all prompts: ``salt``, and ``image``, the seed of a random picture.
        """
        self._send({"do": "generate", "prompts": [{"ids": p, **fields} for p in prompts], "max_tokens": max_tokens})

    def end(self) -> dict:
        """Return tokens, cached (prompt tokens that were hits), reasons and seconds of what ``begin`` sent."""
        return self._receive(ANSWER_S)

    def generate(self, prompts: list, *, max_tokens: int = 8, **fields: object) -> dict:
        """Send prompts as ``begin`` does and wait for the answer."""
        self.begin(prompts, max_tokens=max_tokens, **fields)
        return self.end()

    def reset(self) -> None:
        """Empty the engine's own prefix cache."""
        # Blocks of finished requests are held until their stores are done.
        until(lambda: self._ask({"do": "reset"}), 30, "a reset of the prefix cache")

    def damage(self, *place: int) -> None:
        """From now on zero one layer (group, layer, or -1 for all) of what is loaded; nothing, if there is no *place*.

        Only in an engine whose worker is in the same process.
        """
        self._ask({"do": "damage", "place": place})

    def metrics(self) -> dict[str, float]:
        return self._ask({"do": "metrics"})

    def log(self) -> str:
        return self._group.log.read_text(errors="replace")

    def let_go(self) -> None:
        """Tell it that its program is over; ``close`` waits for its end. Idempotent."""
        stdin = self._group.process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()

    def close(self) -> None:
        """Let it end as an engine does whose program is over, if it can."""
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._group.process.wait(STOP_S)
        self._group.end()

    def _ask(self, command: dict) -> object:
        self._send(command)
        return self._receive(ANSWER_S)

    def _send(self, command: dict) -> None:
        stdin = self._group.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()

    def _receive(self, timeout_s: float) -> object:
        stdout, ends_s = self._group.process.stdout, monotonic() + timeout_s
        assert stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stdout], [], [], max(0.0, ends_s - monotonic()))
            data = os.read(stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"the engine {'ended' if ready else 'did not answer in time'}:\n{self._group.tail()}"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return msgspec.json.decode(line)


@contextmanager
def engine(python: Path, folder: Path, model: Path, **options: object) -> Iterator[Engine]:
    """An engine that is ready."""
    running = Engine(python, folder, model, **options)
    try:
        yield running.ready()
    finally:
        running.close()


def serving(model: Path, **options: object) -> list[str]:
    """Options of vLLM's HTTP server, the same for all of the tests."""
    values = {
        "model": str(model),
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 4608,
        "max-num-batched-tokens": 4608,
        "block-size": 32,
        "kv-cache-memory-bytes": 256 * MIB,
        "enforce-eager": True,
        "enable-prompt-tokens-details": True,
    } | options
    words = []
    for name, value in values.items():
        words += [f"--{name}"]
        words += [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    return words


class HttpEngine:
    """The OpenAI-compatible server of vLLM."""

    def __init__(self, python: Path, folder: Path, model: Path, transfer: dict | None, **options: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        threads = options.pop("threads", "0-1")
        if transfer:
            options["kv-transfer-config"] = json.dumps(transfer)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += serving(model, host="127.0.0.1", port=port, **options)
        self._group = Group.of(command, engine_environ(str(threads)), folder / f"http-{port}.log")

    def ready(self) -> "HttpEngine":
        def answers() -> bool:
            assert self._group.alive(), self._group.tail()
            try:
                return self.get("/health") == ""
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                return False

        until(answers, START_S, "the HTTP server's start")
        return self

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict | None = None, headers: dict[str, str] | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data or b"", {"Content-Type": "application/json"} | (headers or {}), method="POST"
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def metric(self, name: str) -> float:
        """Sum of all series of one metric."""
        lines = [line for line in self.get("/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def complete(self, ids: list[int], max_tokens: int = 8, *, replica: int | None = None, **fields: object) -> dict:
        """Answer one prompt; returns the tokens, how many of the prompt were cached, and the whole answer.

        Args:
            ids: the prompt.
            max_tokens: how many tokens the answer has.
            replica: which data parallel replica answers.
            fields: of the request's body.
        """
        body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        answer = self.post("/v1/completions", body | {"return_token_ids": True} | fields, headers)
        details = answer["usage"]["prompt_tokens_details"] or {}
        cached = details.get("cached_tokens") or 0
        return {"tokens": answer["choices"][0]["token_ids"], "cached": cached, "answer": answer}

    def close(self) -> None:
        self._group.end(signal.SIGINT)


class TwoNodeEngine(HttpEngine):
    """One engine of two tensor parallel ranks, each on a node of its own, as vLLM's several-node mode has it."""

    def __init__(self, python: Path, folder: Path, model: Path, transfers: list[dict], nodes: list[Node]) -> None:
        self.url = f"http://{nodes[0].address}:8000"
        metadata = folder / "metadata" / "vllm.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        # The command line asks for a distribution of this name, which the CPU build does not have.
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {chosen_version()}+cpu\n")
        self._groups = []
        for rank, (node, transfer) in enumerate(zip(nodes, transfers, strict=True)):
            options = {"nnodes": len(nodes), "node-rank": rank, "master-addr": nodes[0].address, "master-port": 29501}
            options |= {"tensor-parallel-size": len(nodes), "kv-transfer-config": json.dumps(transfer)}
            options |= {"headless": True} if rank else {"host": node.address, "port": 8000}
            command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", *serving(model, **options)]
            environ = engine_environ("0|1") | {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": node.address}
            environ["PYTHONPATH"] += f":{metadata.parents[1]}"
            self._groups.append(Group.of(node.command(command), environ, folder / f"rank-{rank}.log"))
        self._group = self._groups[0]

    def close(self) -> None:
        """End the follower's workers too: they outlive a leader that is killed."""
        for group in self._groups:
            group.end(signal.SIGINT)


@contextmanager
def http_engine(
    python: Path, folder: Path, model: Path, transfer: dict | None, **options: object
) -> Iterator[HttpEngine]:
    """An HTTP server that is ready."""
    running = HttpEngine(python, folder, model, transfer, **options)
    try:
        yield running.ready()
    finally:
        running.close()
