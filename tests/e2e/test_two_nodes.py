# SPDX-License-Identifier: Apache-2.0
"""One engine over two nodes, a rank in a pod on each, wired by nothing but labels: hits are what both servers hold."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.engines import MODEL, Engine, engine_pod, prompt
from tests.e2e.kube import Kube, Object
from tests.e2e.pools import POOL_LABEL
from tests.e2e.stories import CACHED, Story, story

STUB = "/opt/stub"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""The CPU build has another distribution's name, and vLLM's own command asks for its version by this one."""


@pytest.fixture
def pair(kube: Kube, nodes: list[str], engine_python: Path, small_model: Path) -> Iterator[tuple[Story, Engine]]:
    """The engine, which answers at its first rank's pod."""
    with story(kube, "baseline", (engine_python, small_model), []) as made:
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "stub", "namespace": made.namespace},
                "data": {"METADATA": METADATA},
            }
        )
        leader = Engine(kube, rank_pod(made.namespace, 0, nodes[0], "$(VLLM_HOST_IP)")).start()
        address = kube.wait("an address", lambda: kube.get("pod", "rank-0", made.namespace)["status"]["podIP"])
        Engine(kube, rank_pod(made.namespace, 1, nodes[1], address)).start()
        yield made, leader.wait_ready()


def rank_pod(namespace: str, rank: int, node: str, address: str) -> Object:
    """One rank's pod, as vLLM's own way of running over several nodes has it."""
    more = ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
    more += ["--master-addr", address, "--master-port", "29501", *["--headless"] * (rank > 0)]
    pod = engine_pod(namespace, f"rank-{rank}", node, {POOL_LABEL: "main", "kvpool.dev/group": "pair"}, more)
    container = pod["spec"]["containers"][0]
    container["command"] = ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]
    container["args"] = [MODEL, *(a for a in container["args"] if a not in ("--model", MODEL))]
    # Ranks compile a piece of the embedding, and the image has no compiler.
    own = {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_CPU_OMP_THREADS_BIND": str(rank), "TORCH_COMPILE_DISABLE": "1"}
    kept = [v for v in container["env"] if v["name"] not in own]
    address_field = {"fieldRef": {"fieldPath": "status.podIP"}}
    container["env"] = [
        {"name": "VLLM_HOST_IP", "valueFrom": address_field},
        *({"name": k, "value": v} for k, v in own.items()),
        *(v | {"value": f"{STUB}:{v['value']}"} if v["name"] == "PYTHONPATH" else v for v in kept),
    ]
    container["volumeMounts"].append({"name": "stub", "mountPath": f"{STUB}/vllm-0.32.0+cpu.dist-info"})
    pod["spec"]["volumes"].append({"name": "stub", "configMap": {"name": "stub"}})
    if rank:
        del container["readinessProbe"]
    return pod


def test_hits_are_the_smallest_answer_and_a_lost_server_costs_computing_alone(
    kube: Kube, pair: tuple[Story, Engine], nodes: list[str]
) -> None:
    made, engine = pair
    tokens, cached = engine.complete(prompt(1))
    for node in nodes:
        made.servers.wait_chunks(node, 2)
    engine.forget()

    assert cached == 0
    assert engine.complete(prompt(1)) == (tokens, CACHED)

    name = made.servers.on(nodes[1])
    kube.delete("pod", name, made.namespace, "--grace-period=0", "--force")
    engine.forget()
    assert engine.complete(prompt(1)) == (tokens, 0)
    made.servers.wait_ready()

    answers = []

    def loaded() -> bool:
        engine.forget()
        answers.append(engine.complete(prompt(1)))
        return answers[-1][1] == CACHED

    kube.wait("hits at both servers again", loaded, 90)
    assert all(found == tokens for found, _ in answers)
