# SPDX-License-Identifier: Apache-2.0
"""Starts one engine process of the demo and talks to it. Its log goes to a file; at the end nothing is left of it."""

import json
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvpool.cli.errors import Failure

__all__ = ["EngineProcess", "EngineSetup", "Run"]

ROOT: Final = Path(__file__).resolve().parents[1]
START_S: Final = 180.0
PROMPT_S: Final = 120.0
END_S: Final = 20.0
LOG_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What every engine of the demo is started with."""

    python: Path
    """Interpreter of the environment with vLLM."""

    model: Path
    server: str
    options: dict[str, Any]
    """Arguments of vLLM's LLM class."""

    output_tokens: int
    log: Path


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt's result."""

    ttft_s: float
    tokens: tuple[int, ...]
    cached_tokens: int


class EngineProcess:
    """One engine. A context manager; it and all its children are ended at the end, however that comes."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start nothing yet."""
        self._setup = setup
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it takes prompts.

        Raises:
            Failure: it ended or did not come up; the text has the end of its log.
        """
        order = {
            "model": str(self._setup.model),
            "options": self._setup.options,
            "output_tokens": self._setup.output_tokens,
        }
        with self._setup.log.open("ab") as log:
            self._child = subprocess.Popen(
                [str(self._setup.python), str(ROOT / "tools" / "demo_engine.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ(),
                text=True,
                process_group=0,
            )
        try:
            self._ask(order, START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end; kill what is left of its process group after twenty seconds."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.close()
            child.wait(END_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            child.kill()
        finally:
            _kill_group(child.pid)
            child.wait()
            child.stdout.close()
            self._child = None

    def run(self, tokens: list[int]) -> Run:
        """Run one prompt alone.

        Raises:
            Failure: the engine ended or did not answer within two minutes.
        """
        answer = self._ask(tokens, PROMPT_S)
        return Run(answer["ttft_s"], tuple(answer["tokens"]), answer["cached"])

    def _ask(self, question: Any, timeout_s: float) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        # Reading has no deadline of its own: a watchdog ends the process, and reading with it.
        watchdog = threading.Timer(timeout_s, child.kill)
        watchdog.start()
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise Failure(
                f"the engine ended or did not answer within {timeout_s:.0f} s; its log ends:\n{self._log_end()}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _environ(self) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0))
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT / "cacheserver"),
            "KVPOOL_CLIENT__SERVER": self._setup.server,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # One process: no second interpreter to start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Without it a configured connector changes the number of threads, and times could not be compared.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        }

    def _log_end(self) -> str:
        return "\n".join(self._setup.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
