# SPDX-License-Identifier: Apache-2.0
"""The corpus of pods: files under tests/golden/wiring, the axes on which they differ, and what is known of each pool.

A file has three documents: the pool (a name of POOLS), the pod as it is created, the patch that wiring makes.
What a pod is on each axis is read off the pod itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.unit.operator.cases import PUBLIC_KEY

from kvpool_operator.spec import Pool, parse_pool
from kvpool_operator.wiring import Outcome, Situation, wire

Pod = dict[str, Any]

FOLDER = Path(__file__).parents[3] / "golden" / "wiring"
NAMESPACE = "models"

AXES: dict[str, list[str]] = {
    "origin": ["deployment", "statefulset", "leader", "worker", "ray-head", "ray-worker", "kserve", "stack", "job"],
    "command": [
        "image-arguments",
        "serve",
        "command-alone",
        "module",
        "starter",
        "shell",
        "shell-folded",
        "ray",
        "script",
        "image-alone",
    ],
    "connector": [
        "none",
        "ours",
        "ours-incomplete",
        "ours-inline",
        "dotted",
        "foreign",
        "several",
        "variable",
        "unreadable",
    ],
    "companions": ["alone", "sidecar", "init", "native-sidecar", "mesh", "two-engines"],
    "memory": ["none", "own", "host"],
    "security": ["plain", "group", "restricted"],
    "environment": ["plain", "secret", "seed", "path", "path-elsewhere", "ours"],
    "pool": [
        "near",
        "missing",
        "far",
        "far-unknown",
        "far-stranger",
        "socket",
        "socket-forbidden",
        "socket-alone",
        "copied",
        "mounted",
        "payload-declined",
    ],
}

_SHELLS = ("shell", "shell-folded")
_NO_OPTIONS = ("ray", "image-alone")
_SHELL_CONNECTORS = ("none", "ours", "ours-inline", "foreign", "several")


def excluded(row: dict[str, str]) -> bool:
    """True for values that cannot go together; a row with some of the axes is judged by those."""
    origin, command, connector = row.get("origin"), row.get("command"), row.get("connector")
    if command and origin and (command == "ray") != origin.startswith("ray-"):
        return True  # KubeRay writes the command of its pods, and of no others
    if connector and connector != "none" and (command in _NO_OPTIONS or (origin or "").startswith("ray-")):
        return True  # no words to hold it
    if command in _SHELLS and connector and connector not in _SHELL_CONNECTORS:
        return True  # the rest differ in how options are split, which the shell does
    return row.get("memory") == "host" and row.get("security") == "restricted"  # the level forbids it


@dataclass(frozen=True)
class Case:
    """One pod and what becomes of it."""

    name: str
    pool: str
    pod: Pod
    patch: list[dict[str, Any]]


def read() -> list[Case]:
    found = []
    for file in sorted(FOLDER.glob("*.yaml")):
        pool, pod, patch = yaml.safe_load_all(file.read_text())
        found.append(Case(file.stem, pool["pool"], pod, patch))
    return found


def write(case: Case) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    documents = [{"pool": case.pool}, case.pod, case.patch]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)
    (FOLDER / f"{case.name}.yaml").write_text(f"# SPDX-License-Identifier: Apache-2.0\n{text}")


class _Dumper(yaml.SafeDumper):
    """No anchors, and texts of several lines as such."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)

_SOCKET = {"ipc": {"mode": "HostPathSocket"}}
_ALONE = {**_SOCKET, "network": {"auth": "None"}}
POOLS: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    "near": (NAMESPACE, {}, False),
    "missing": (NAMESPACE, None, False),
    "far": ("caches", {"clients": {"allowedNamespaces": [NAMESPACE]}}, False),
    "far-unknown": ("caches", None, False),
    "far-stranger": ("caches", {}, False),
    "socket": (NAMESPACE, _SOCKET, True),
    "socket-forbidden": (NAMESPACE, _SOCKET, False),
    "socket-alone": (NAMESPACE, _ALONE, False),
    "copied": (NAMESPACE, {"clients": {"payload": {}}}, False),
    "mounted": (NAMESPACE, {"clients": {"payload": {"mode": "ImageVolume", "image": "p.example/kvpool:7.0"}}}, False),
    "payload-declined": (NAMESPACE, {"clients": {"payload": {}, "loadFailurePolicy": "Fail"}}, False),
}
"""Namespace, spec beyond the least, and whether the pod's namespace lets host folders be mounted."""


def pool_named(name: str) -> Pool | None:
    namespace, spec, _ = POOLS[name]
    if spec is None:
        return None
    metadata = {"name": "main", "namespace": namespace, "uid": "11111111-1111-4111-8111-111111111111"}
    return parse_pool({"metadata": metadata, "spec": {"l1": {"size": "1Gi"}, **spec}})


def situation(name: str) -> Situation:
    pool = pool_named(name)
    return Situation(
        namespace=NAMESPACE,
        pool=pool,
        server_key=PUBLIC_KEY if pool else "",
        host_folders=POOLS[name][2],
        payload_image="kvpool-payload:0.1.0",
    )


def outcome(case: Case, pod: Pod | None = None) -> Outcome:
    return wire(case.pod if pod is None else pod, situation(case.pool))


def _engine(pod: Pod) -> Pod:
    """The engine's container, by its place in the shapes of the corpus."""
    named = [c for c in pod["spec"]["containers"] if c["name"] not in ("mesh-proxy", "tokens-exporter")]
    return named[0]


def _origin(pod: Pod) -> str:
    labels = pod["metadata"]["labels"]
    if "ray.io/node-type" in labels:
        return f"ray-{labels['ray.io/node-type']}"
    if (index := labels.get("leaderworkerset.sigs.k8s.io/worker-index")) is not None:
        return "worker" if int(index) else "leader"
    known = {
        "serving.kserve.io/inferenceservice": "kserve",
        "helm-release-name": "stack",
        "batch.kubernetes.io/job-name": "job",
        "apps.kubernetes.io/pod-index": "statefulset",
        "pod-template-hash": "deployment",
    }
    return next(origin for label, origin in known.items() if label in labels)


def _command(pod: Pod) -> str:  # noqa: PLR0911 - one return for each shape
    container = _engine(pod)
    command, args = container.get("command", []), container.get("args", [])
    match command:
        case []:
            return "image-arguments" if args else "image-alone"
        case ["vllm", "serve"]:
            return "serve"
        case [program, "serve", *_] if program.endswith("/vllm"):
            return "command-alone"
        case ["python3", "-m", *_]:
            return "module"
        case ["tini", *_]:
            return "starter"
        case [_, "-c", *_]:
            return "ray" if "ray start" in args[0] else "shell"
        case [_, "-lc", _]:
            return "shell-folded"
        case _:
            return "script"


def _connector(pod: Pod) -> str:
    container = _engine(pod)
    words = [*container.get("command", []), *container.get("args", [])]
    text = " ".join(words)
    if "--kv-transfer-config.kv" in text:
        return "dotted"
    if "--kv_transfer_config=" in text:
        return "ours-inline"
    if "--kv-transfer-config" not in text:
        return "none"
    for sign, value in (
        ("$(KV_TRANSFER_CONFIG)", "variable"),
        ("$(", "unreadable"),
        ("MultiConnector", "several"),
        ("NixlConnector", "foreign"),
        ("lookup_s", "ours"),
    ):
        if sign in text.partition("--kv-transfer-config")[2]:
            return value
    return "ours-incomplete"


def _companions(pod: Pod) -> str:
    names = [c["name"] for c in pod["spec"]["containers"]]
    inits = {c["name"]: c for c in pod["spec"].get("initContainers", [])}
    if "mesh-proxy" in names:
        return "mesh"
    if "tokens-exporter" in names:
        return "sidecar"
    if inits:
        return "native-sidecar" if any("restartPolicy" in c for c in inits.values()) else "init"
    return "two-engines" if len(names) > 1 else "alone"


def _memory(pod: Pod) -> str:
    if pod["spec"].get("hostIPC"):
        return "host"
    return "own" if any(m["mountPath"] == "/dev/shm" for m in _engine(pod)["volumeMounts"]) else "none"


def _security(pod: Pod) -> str:
    context = pod["spec"].get("securityContext", {})
    return "restricted" if "runAsNonRoot" in context else "group" if context else "plain"


def _environment(pod: Pod) -> str:
    env = {e["name"]: e for e in _engine(pod).get("env", [])}
    if "PYTHONPATH" in env:
        return "path-elsewhere" if "valueFrom" in env["PYTHONPATH"] else "path"
    known = {"HF_TOKEN": "secret", "PYTHONHASHSEED": "seed", "KVPOOL_CLIENT__LABEL": "ours"}
    return next((value for name, value in known.items() if name in env), "plain")


_JUDGES: dict[str, Callable[[Pod], str]] = {
    "origin": _origin,
    "command": _command,
    "connector": _connector,
    "companions": _companions,
    "memory": _memory,
    "security": _security,
    "environment": _environment,
}


def place(case: Case) -> dict[str, str]:
    """What *case* is on each axis."""
    return {axis: judge(case.pod) for axis, judge in _JUDGES.items()} | {"pool": case.pool}
