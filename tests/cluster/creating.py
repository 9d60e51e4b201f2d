# SPDX-License-Identifier: Apache-2.0
"""Pods created at a constant rate, on a thread of its own, while a test does something to the admission server."""

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.cluster.conftest import connect

from kvpool_operator.cluster import PODS, Cluster
from kvpool_operator.errors import OperatorError

__all__ = ["Creator", "Tally"]

Pod = dict[str, Any]


@dataclass
class Tally:
    """What became of the pods."""

    wired: int = 0
    unwired: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Creator:
    """Creates pods, every other one marked required, at *rate* a second until it is left.

    Each is asked for whether or not the former ones were answered, as in a cluster; nothing is stored (dry run), but
    every hook is called.
    """

    def __init__(self, kubeconfig: Path, namespace: str, rate: float, *, opted_in: bool = True) -> None:
        self._opted_in = opted_in
        self.tally = Tally()
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._gap_s = 1 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="creator")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        client = await connect(self._kubeconfig)
        cluster, loop = Cluster(client), asyncio.get_running_loop()
        async with client, asyncio.TaskGroup() as tasks:
            due_s = loop.time()
            number = 0
            while not self._stop.is_set():
                tasks.create_task(self._create(cluster, number))
                number, due_s = number + 1, due_s + self._gap_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _create(self, cluster: Cluster, number: int) -> None:
        required = number % 2 == 1
        labels = {"kvpool.dev/pool": "a", **({"kvpool.dev/wiring": "required"} if required else {})}
        labels = labels if self._opted_in else {"app": "plain"}
        container = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model", "m"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"p-{number}", "labels": labels},
            "spec": {"containers": [container]},
        }
        begun_s = asyncio.get_running_loop().time()
        query = {"fieldManager": "test", "dryRun": "All"}
        try:
            made = await cluster._call("POST", PODS.path(self._namespace), query, body=pod)
        except OperatorError as e:
            self.tally.refused.append(str(e))
            return
        self.tally.seconds.append(asyncio.get_running_loop().time() - begun_s)
        if "kvpool.dev/wired" in made["metadata"].get("annotations", {}):
            self.tally.wired += 1
        else:
            self.tally.unwired.append(f"{'required ' if required else ''}p-{number}")
