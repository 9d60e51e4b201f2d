# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in pods: a stock-like image, the pinned environment and a model mounted read-only by a claim."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.kube import Kube, Object
from tests.engine.harness import MIB, engine_environ
from tools import node_images

__all__ = ["PORT", "Engine", "claims", "engine_pod", "prompt"]

PORT = 8000
ENVIRONMENT, MODEL = "/opt/vllm", "/opt/model"
START_S = 400.0


def claims(namespace: str, python: Path, model: Path) -> list[Object]:
    """Claims of *namespace* on the host's environment and model; the Baseline level allows these, but no hostPath."""
    made = []
    for name, folder in (("environment", python.parents[1]), ("model", model)):
        volume = f"{namespace}-{name}"
        common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        made.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {**common, "capacity": {"storage": "10Gi"}, "hostPath": {"path": str(folder)}},
            }
        )
        made.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**common, "volumeName": volume, "resources": {"requests": {"storage": "10Gi"}}},
            }
        )
    return made


def engine_pod(namespace: str, name: str, node: str, labels: Mapping[str, str], more: Sequence[str] = ()) -> Object:
    """An engine as a user would write it, who knows nothing of kvpool but the label.

    Args:
        namespace: where.
        name: of the pod.
        node: where it must run.
        labels: of the pod.
        more: further arguments.
    """
    environ = engine_environ() | {
        "PYTHONPATH": f"{ENVIRONMENT}/lib/python3.11/site-packages",
        "HOME": "/tmp",
        "XDG_CACHE_HOME": "/tmp/cache",
        # A busy machine may starve a thread for longer than an engine in production should wait for a lookup.
        "KVPOOL_CLIENT__LOOKUP_S": "10",
        "KVPOOL_CLIENT__REQUEST_S": "10",
    }
    arguments = ["--model", MODEL, "--served-model-name", "tiny", "--port", str(PORT), "--dtype", "float32"]
    arguments += ["--max-model-len", "4608", "--max-num-batched-tokens", "4608", "--block-size", "32"]
    arguments += ["--kv-cache-memory-bytes", str(128 * MIB), "--enforce-eager", "--enable-prompt-tokens-details"]
    container = {
        "name": "vllm",
        "image": node_images.reference("engine"),
        "imagePullPolicy": "Never",
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": [*arguments, *more],
        "env": [{"name": k, "value": v} for k, v in environ.items()],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5},
        "volumeMounts": [
            {"name": "environment", "mountPath": ENVIRONMENT, "readOnly": True},
            {"name": "model", "mountPath": MODEL, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        *({"name": n, "persistentVolumeClaim": {"claimName": n, "readOnly": True}} for n in ("environment", "model")),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            "volumes": volumes,
        },
    }


def prompt(seed: int, tokens: int = 600) -> list[int]:
    """Token ids that no other seed shares a chunk of."""
    return [10 + (seed * 7919 + i * i * 31 + i) % 1900 for i in range(tokens)]


class Engine:
    """One engine in a pod."""

    def __init__(self, kube: Kube, pod: Object) -> None:
        self.kube = kube
        self.namespace = pod["metadata"]["namespace"]
        self.name = pod["metadata"]["name"]
        self._pod = pod

    def start(self) -> "Engine":
        """Create the pod; `wait_ready` waits for it."""
        self.kube.apply(self._pod)
        return self

    def wait_ready(self) -> "Engine":
        """Wait until it answers; an end of its container fails at once, with its log."""

        def ready() -> bool:
            pod = self.kube.get("pod", self.name, self.namespace)
            ended = [
                s for s in pod["status"].get("containerStatuses", []) if s["restartCount"] or "terminated" in s["state"]
            ]
            if ended:
                raise RuntimeError(f"{self.name} ended:\n{self.log()}")
            return self.kube.ready(self.name, self.namespace)

        try:
            self.kube.wait(f"engine {self.name}", ready, START_S)
        except TimeoutError as e:
            raise AssertionError(f"{e}\n{self.log()}") from e
        return self

    def complete(self, ids: list[int], max_tokens: int = 4) -> tuple[list[int], int]:
        """Tokens that follow, and how many tokens of the prompt were cached."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._post("/v1/completions", body | {"return_token_ids": True})
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def forget(self) -> None:
        """Empty the engine's own cache, so that only the server's can hit."""
        self._post("/reset_prefix_cache", {})

    def metric(self, name: str) -> float:
        """Sum of all series of one metric."""
        text = self.kube.http_get(self.namespace, self.name, PORT, "/metrics")
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def log(self, lines: int = 60) -> str:
        """The end of what its containers wrote."""
        return self.kube.kubectl(
            "logs", self.name, "--namespace", self.namespace, "--all-containers", f"--tail={lines}"
        )

    def delete(self) -> None:
        """End it at once."""
        self.kube.delete("pod", self.name, self.namespace, "--grace-period=1")

    def _post(self, path: str, body: Object) -> Object:
        return self.kube.http_post(self.namespace, self.name, PORT, path, body)
