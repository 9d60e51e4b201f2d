# SPDX-License-Identifier: Apache-2.0
"""Writes the corpus of pods: shapes after public patterns, combined so that each pair of their values occurs.

``python -m tests.unit.operator.wiring.compose`` writes what wiring makes of each pod anew; with ``--pods`` the pods,
too. Review the difference.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.unit.operator.wiring.corpus import AXES, FOLDER, Case, excluded, outcome, read, write

Pod = dict[str, Any]
Values = dict[str, str]

ENGINE_IMAGE = "vllm/vllm-openai:v0.32.0"
MODEL = "Qwen/Qwen3-8B"
OURS = {"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool.connector.facade", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
WHOLE = {**OURS, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"lookup_s": 2.5}}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, OURS]},
}

CONNECTORS: dict[str, list[str]] = {
    "none": [],
    "ours": ["--kv-transfer-config", json.dumps(WHOLE)],
    "ours-incomplete": ["--kv-transfer-config", json.dumps({"kv_connector": "KVPoolConnector"})],
    "ours-inline": ["--kv_transfer_config=" + json.dumps(OURS)],
    "dotted": ["--kv-transfer-config.kv_connector", "KVPoolConnector", "--kv-transfer-config.kv_role", "kv_both"],
    "foreign": ["--kv-transfer-config", json.dumps(NIXL)],
    "several": ["--kv-transfer-config", json.dumps(MULTI)],
    "variable": ["--kv-transfer-config", "$(KV_TRANSFER_CONFIG)"],
    "unreadable": ["--kv-transfer-config", "$(FROM_ELSEWHERE)"],
}

LABELS: dict[str, dict[str, str]] = {
    "deployment": {"app": "chat", "pod-template-hash": "7c9d5f8b6"},
    "statefulset": {"app": "chat", "apps.kubernetes.io/pod-index": "0", "statefulset.kubernetes.io/pod-name": "chat-0"},
    "leader": {
        "leaderworkerset.sigs.k8s.io/name": "deep",
        "leaderworkerset.sigs.k8s.io/group-index": "0",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    },
    "worker": {
        "leaderworkerset.sigs.k8s.io/name": "deep",
        "leaderworkerset.sigs.k8s.io/group-index": "0",
        "leaderworkerset.sigs.k8s.io/worker-index": "1",
    },
    "ray-head": {"ray.io/cluster": "deep", "ray.io/node-type": "head", "ray.io/group": "headgroup"},
    "ray-worker": {"ray.io/cluster": "deep", "ray.io/node-type": "worker", "ray.io/group": "gpu"},
    "kserve": {"serving.kserve.io/inferenceservice": "chat", "component": "predictor"},
    "stack": {"model": "qwen3", "helm-release-name": "stack", "environment": "router", "release": "router"},
    "job": {"batch.kubernetes.io/job-name": "score", "jobset.sigs.k8s.io/jobset-name": "score"},
}
NAMES = {"kserve": "kserve-container", "ray-head": "ray-head", "ray-worker": "ray-worker", "leader": "vllm-leader"}


def run_words(words: Values, more: list[str]) -> Pod:  # noqa: PLR0911 - one for each shape
    """Command and arguments of the engine."""
    options = ["--port", "8000", "--max-model-len=$(MAX_LEN)", *more]
    line = " ".join(w if w.startswith("-") or w.isalnum() else f"'{w}'" for w in more)
    across = "--tensor-parallel-size 8 --pipeline-parallel-size $(LWS_GROUP_SIZE)"
    match words["command"]:
        case "image-arguments":
            return {"args": ["--model", MODEL, *options]}
        case "serve":
            return {"command": ["vllm", "serve"], "args": [MODEL, *options]}
        case "command-alone":
            return {"command": ["/usr/local/bin/vllm", "serve", MODEL, *options]}
        case "module":
            module = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
            return {"command": module, "args": ["--model", MODEL, *options]}
        case "starter":
            return {"command": ["tini", "-s", "--", "env", "VLLM_USE_V1=1", "vllm", "serve", MODEL], "args": options}
        case "shell":
            return {"command": ["sh", "-c"], "args": [f"exec vllm serve {MODEL} --port 8000 {across} {line}".rstrip()]}
        case "shell-folded":
            text = f"set -eu\npython3 -m vllm.entrypoints.openai.api_server \\\n  --model {MODEL} {line}".rstrip()
            return {"command": ["/bin/bash", "-lc", text]}
        case "ray":
            head = words["origin"] == "ray-head"
            join = "--head --port=6379" if head else "--address=deep-head-svc:6379"
            return {"command": ["/bin/bash", "-c", "--"], "args": [f"ulimit -n 65536; ray start {join} --block"]}
        case "script":
            return {"command": ["/opt/start.sh"], "args": ["--model", MODEL, *more]}
        case _:
            return {}


def engine(words: Values, name: str) -> Pod:
    """The engine's container."""
    image = "rayproject/ray-llm:2.52" if words["command"] == "ray" else ENGINE_IMAGE
    image = "registry.example/team/serve:3" if words["command"] == "script" else image
    made: Pod = {"name": name, "image": image, **run_words(words, CONNECTORS[words["connector"]])}
    made["ports"] = [{"containerPort": 8000, "name": "http"}]
    made["resources"] = {
        "limits": {"nvidia.com/gpu": "2", "memory": "64Gi"},
        "requests": {"cpu": "4", "memory": "64Gi"},
    }
    made["env"] = [{"name": "MAX_LEN", "value": "32768"}, *variables(words)]
    if words["command"] in ("image-arguments", "serve"):
        made["readinessProbe"] = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 5}
    if words["security"] == "restricted":
        made["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = [{"name": "models", "mountPath": "/models"}]
    if words["memory"] == "own":
        mounts.append({"name": "dshm", "mountPath": "/dev/shm"})
    made["volumeMounts"] = mounts
    return made


def variables(words: Values) -> list[Pod]:
    found = []
    if words["connector"] == "variable":
        found.append({"name": "KV_TRANSFER_CONFIG", "value": json.dumps(OURS)})
    token = {"secretKeyRef": {"name": "hub", "key": "token"}}
    match words["environment"]:
        case "secret":
            found.append({"name": "HF_TOKEN", "valueFrom": token})
        case "seed":
            found.append({"name": "PYTHONHASHSEED", "value": "42"})
        case "path":
            found.append({"name": "PYTHONPATH", "value": "/workspace/plugins"})
        case "path-elsewhere":
            source = {"configMapKeyRef": {"name": "paths", "key": "python", "optional": True}}
            found.append({"name": "PYTHONPATH", "valueFrom": source})
        case "ours":
            found.append({"name": "KVPOOL_CLIENT__LOOKUP_S", "value": "0.5"})
            found.append({"name": "KVPOOL_CLIENT__LABEL", "value": "chosen"})
    return found


def pod(words: Values) -> Pod:
    """A pod as the API server gets it."""
    origin = words["origin"]
    name = NAMES.get(origin, "vllm")
    metadata: Pod = {"name": f"chat-{origin}", "labels": {**LABELS[origin], "kvpool.dev/pool": "main"}}
    spec: Pod = {
        "containers": [engine(words, name)],
        "volumes": [{"name": "models", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 30,
    }
    if words["memory"] == "own":
        spec["volumes"].append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "12Gi"}})
    if words["memory"] == "host":
        spec["hostIPC"] = True
    secure(spec, words["security"])
    COMPANIONS[words["companions"]](metadata, spec, words)
    if words["pool"].startswith("far"):
        metadata["annotations"] = {**metadata.get("annotations", {}), "kvpool.dev/pool-namespace": "caches"}
    if words["pool"] == "payload-declined":
        metadata["annotations"] = {**metadata.get("annotations", {}), "kvpool.dev/payload": "none"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def secure(spec: Pod, level: str) -> None:
    if level == "restricted":
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": 2000,
            "fsGroup": 2000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    elif level == "group":
        spec["securityContext"] = {"fsGroup": 100, "supplementalGroups": [44]}


def alone(metadata: Pod, spec: Pod, words: Values) -> None:
    pass


def sidecar(metadata: Pod, spec: Pod, words: Values) -> None:
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    beside = {"name": "tokens-exporter", "image": "registry.example/exporter:1", "resources": small}
    spec["containers"].append(harden(beside, words))


def initialised(metadata: Pod, spec: Pod, words: Values) -> None:
    fetch = {"name": "fetch", "image": "registry.example/fetch:2", "args": ["--to", "/models"]}
    fetch["volumeMounts"] = [{"name": "models", "mountPath": "/models"}]
    spec["initContainers"] = [harden(fetch, words)]


def native(metadata: Pod, spec: Pod, words: Values) -> None:
    logs = {"name": "logs", "image": "registry.example/logs:1", "restartPolicy": "Always"}
    spec["initContainers"] = [harden(logs, words)]


def mesh(metadata: Pod, spec: Pod, words: Values) -> None:
    """As another webhook leaves it: its container first, its volumes, its annotations."""
    proxy = {"name": "mesh-proxy", "image": "registry.example/mesh/proxy:1.30", "args": ["proxy", "sidecar"]}
    proxy["volumeMounts"] = [{"name": "mesh-token", "mountPath": "/var/run/secrets/mesh"}]
    token = {"serviceAccountToken": {"audience": "mesh-ca", "expirationSeconds": 43200, "path": "token"}}
    spec["volumes"].append({"name": "mesh-token", "projected": {"sources": [token]}})
    place = len(spec["containers"]) if words["origin"].startswith("ray") else 0
    spec["containers"].insert(place, harden(proxy, words))
    metadata["annotations"] = {"mesh.example/status": "injected"}


def two(metadata: Pod, spec: Pod, words: Values) -> None:
    """Prefill and decode in one pod, named, since a glance does not always tell."""
    second = engine(words, "vllm-second")
    second["ports"] = [{"containerPort": 8001}]
    spec["containers"].append(second)
    metadata["annotations"] = {"kvpool.dev/container": f"{spec['containers'][0]['name']},vllm-second"}


def harden(container: Pod, words: Values) -> Pod:
    if words["security"] == "restricted":
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return container


COMPANIONS: dict[str, Callable[[Pod, Pod, Values], None]] = {
    "alone": alone,
    "sidecar": sidecar,
    "init": initialised,
    "native-sidecar": native,
    "mesh": mesh,
    "two-engines": two,
}


def rows() -> Iterator[Values]:
    """Rows that together hold each pair of values that can occur, each row chosen for the most new ones."""
    names = list(AXES)
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if not excluded({a: x, b: y})
    }
    while missing:
        row = dict(min(missing, key=sorted))
        for axis in names:
            if axis not in row:
                fits = [v for v in AXES[axis] if not excluded({**row, axis: v})]
                row[axis] = max(fits, key=lambda v: (gain(missing, {**row, axis: v}), -AXES[axis].index(v)))
        missing -= {frozenset(p) for p in itertools.combinations(row.items(), 2)}
        yield {axis: row[axis] for axis in names}


EXTRA: list[Values] = [{axis: values[0] for axis, values in AXES.items()} | {"origin": o} for o in ("leader", "worker")]
"""Rows that pairs alone do not ask for: a LeaderWorkerSet whose words could be appended to."""


def gain(missing: set[frozenset[tuple[str, str]]], row: Values) -> int:
    return sum(frozenset(p) in missing for p in itertools.combinations(row.items(), 2))


def main(arguments: list[str]) -> None:
    if "--pods" in arguments:
        for old in FOLDER.glob("*.yaml"):
            old.unlink()
        for number, row in enumerate([*rows(), *EXTRA], 1):
            name = f"{number:03}-{row['origin']}-{row['command']}"
            write(Case(name, row["pool"], pod(row), []))
    for case in read():
        write(Case(case.name, case.pool, case.pod, [dict(o) for o in outcome(case).patch]))


if __name__ == "__main__":
    main(sys.argv[1:])
