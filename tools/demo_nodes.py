# SPDX-License-Identifier: Apache-2.0
"""Third act of the demo: real pods on two real nodes, and engines that know nothing of kvpool but a label."""

import time
from pathlib import Path
from typing import Any, Final

from tests.chart.rendering import Helm
from tests.e2e.engines import Engine, prompt
from tests.e2e.kube import Kube
from tests.e2e.local import LocalCluster, archives, cannot
from tests.e2e.pools import POOL_LABEL
from tests.e2e.stories import Story, story
from tests.engine.conftest import model
from tools import vllm_env
from tools.chart import CHART
from tools.cluster_assets import AssetError
from tools.demo_act import ActSkipped, say
from tools.images import ImageError

__all__ = ["play"]

SYSTEM: Final = "kvpool-system"
PREFIX_CHUNKS: Final = 8
CACHED: Final = PREFIX_CHUNKS * 256
PROMPT: Final = prompt(1, CACHED + 64)


def play(out: Path) -> str:
    """Run the act; returns what went wrong, empty for a success.

    Args:
        out: existing folder; what is known of a cluster that failed is left there.

    Raises:
        ActSkipped: this host cannot run real nodes.
    """
    if reason := cannot():
        raise ActSkipped(reason)
    start = time.perf_counter()
    try:
        images = archives()
    except (AssetError, ImageError) as e:
        raise ActSkipped(str(e).splitlines()[0]) from e
    python = vllm_env.environment()
    with LocalCluster(images) as cluster:
        kube = Kube(cluster.kubectl)
        try:
            wrong = _played(kube, cluster, (python, model(python, "large")))
        except BaseException:
            cluster.collect(out / "nodes")
            raise
    say(f"\nall of it took {time.perf_counter() - start:.0f} s")
    return wrong


def _played(kube: Kube, cluster: LocalCluster, mounted: tuple[Path, Path]) -> str:
    nodes = kube.nodes()
    say(f"nodes {', '.join(nodes)}: kubelet, containerd, kube-proxy, each on a machine of its own")
    say(f"\n$ helm install kvpool charts/kvpool --namespace {SYSTEM} --create-namespace")
    where = ("--kubeconfig", cluster.kubeconfig, "--namespace", SYSTEM, "--create-namespace")
    Helm(cluster.programs["helm"]).run("install", "kvpool", CHART, *where, "--set", "image.registry=localhost")
    kube.kubectl("rollout", "status", "deployment", "--namespace", SYSTEM, "--timeout=150s", timeout_s=310)
    say(kube.kubectl("get", "pods", "--namespace", SYSTEM, "-o", "wide").rstrip())
    say(f"\nthen a pool, and three vLLM pods with the label {POOL_LABEL}=main and nothing else of ours ...")
    places = [("first", nodes[0]), ("second", nodes[0]), ("other", nodes[1])]
    with story(kube, "baseline", mounted, places) as told:
        say(kube.kubectl("get", "pods", "--namespace", told.namespace, "-o", "wide").rstrip())
        wrong = _asked(told, nodes)
        if not wrong:
            told.servers.wait_counted(len(places), CACHED)
        say("\n$ kubectl get kvp")
        say(kube.kubectl("get", "kvp", "--namespace", told.namespace).rstrip())
    return wrong


def _asked(told: Story, nodes: list[str]) -> str:
    """The same prompt for each engine in turn."""
    answers: dict[str, tuple[list[int], int]] = {}

    def ask(name: str, says: str) -> None:
        start = time.perf_counter()
        answers[name] = _answer(told.engines[name])
        spent_s = time.perf_counter() - start
        say(f"{name:7} {answers[name][1]:4} tokens from the cache, {spent_s * 1e3:5.0f} ms: {says}")

    say("")
    for number, engine in enumerate(told.engines.values()):
        engine.complete(prompt(2 + number, 64))  # the first forward of a process pays for more than itself
    ask("first", f"computes the prompt; the server on {nodes[0]} keeps it")
    told.servers.wait_chunks(nodes[0], PREFIX_CHUNKS)
    ask("second", "another pod of the same node loads it")
    ask("other", f"a pod on {nodes[1]} has a server of its own, and computes")
    cached = {name: answer[1] for name, answer in answers.items()}
    if len({tuple(tokens) for tokens, _ in answers.values()}) != 1:
        return f"tokens differ: {answers}"
    expected: dict[str, Any] = {"first": 0, "second": CACHED, "other": 0}
    return "" if cached == expected else f"cached tokens: {cached}, expected {expected}"


def _answer(engine: Engine) -> tuple[list[int], int]:
    return engine.complete(PROMPT, max_tokens=8)
