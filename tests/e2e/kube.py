# SPDX-License-Identifier: Apache-2.0
"""A cluster as a person with kubectl sees it: apply, look, wait, ask a pod over HTTP; the same on every cluster."""

import contextlib
import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tests.cluster.processes import wait_for
from tests.engine.harness import PATIENCE

__all__ = ["Kube", "Kubectl", "Object", "write_state"]

Object = dict[str, Any]

_POST = """
import json, sys, urllib.request
asked = json.load(sys.stdin)
kind = {"Content-Type": "application/json"}
request = urllib.request.Request(asked["url"], json.dumps(asked["body"]).encode(), kind, method="POST")
with urllib.request.urlopen(request, timeout=100) as answer:
    sys.stdout.write(answer.read().decode())
"""
"""The API server's proxy would do, but kubectl sends no content type through it."""


class Kubectl(Protocol):
    """Runs kubectl as the administrator and returns what it prints."""

    def __call__(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> str: ...


def write_state(kubectl: Kubectl, target: Path) -> None:
    """Write all objects that may say why something failed to *target*."""
    target.mkdir(parents=True, exist_ok=True)
    for what in ("pods", "events", "nodes", "daemonsets,deployments,services,configmaps", "kvcachepools"):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            text = kubectl("get", what, "--all-namespaces", "-o", "yaml")
            (target / f"{what.partition(',')[0]}.yaml").write_text(text)
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        for pod in json.loads(kubectl("get", "pods", "--all-namespaces", "-o", "json"))["items"]:
            _write_log(kubectl, pod["metadata"], target)


def _write_log(kubectl: Kubectl, pod: Object, target: Path) -> None:
    where = ("--namespace", pod["namespace"], "--all-containers", "--tail=1000")
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        (target / f"{pod['namespace']}-{pod['name']}.log").write_text(kubectl("logs", pod["name"], *where))


class Kube:
    """What tests do with a cluster."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def apply(self, *bodies: Object) -> None:
        """Create or change objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(bodies)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        """One object.

        Raises:
            AssertionError: there is none.
        """
        return json.loads(self.kubectl("get", kind, name, "--namespace", namespace, "-o", "json"))

    def all(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """All objects of a kind that *selector* finds."""
        text = self.kubectl("get", kind, "--namespace", namespace, "--selector", selector, "-o", "json")
        return json.loads(text)["items"]

    def delete(self, kind: str, name: str, namespace: str, *options: str) -> None:
        """Delete an object; kubectl waits until it is gone."""
        self.kubectl("delete", kind, name, "--namespace", namespace, *options, timeout_s=120)

    def nodes(self) -> list[str]:
        """Names of the nodes that pods may run on."""
        found = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return sorted(n["metadata"]["name"] for n in found if not n["spec"].get("taints"))

    def version(self) -> tuple[int, int]:
        """Of the API server: major and minor."""
        found = json.loads(self.kubectl("version", "-o", "json"))["serverVersion"]
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def namespace(self, level: str) -> str:
        """A fresh namespace that enforces a pod-security *level*."""
        name = f"e2e-{uuid.uuid4().hex[:8]}"
        labels = {"pod-security.kubernetes.io/enforce": level}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        return name

    def wait(self, what: str, check: Callable[[], Any], deadline_s: float = 90.0) -> Any:
        """Ask *check* until its answer is true; returns that. What is not there yet is no."""
        found: list[Any] = [None]

        def ask() -> bool:
            try:
                found[0] = check()
            except (AssertionError, KeyError, subprocess.TimeoutExpired):
                return False
            return bool(found[0])

        wait_for(what, ask, deadline_s * PATIENCE, interval_s=0.3)
        return found[0]

    def condition(self, kind: str, name: str, namespace: str, wanted: str, status: str = "True") -> bool:
        """True if the object has condition *wanted* with *status*."""
        found = self.get(kind, name, namespace).get("status", {}).get("conditions", [])
        return any(c["type"] == wanted and c["status"] == status for c in found)

    def ready(self, pod: str, namespace: str) -> bool:
        """True if the pod is."""
        return self.condition("pod", pod, namespace, "Ready")

    def http_get(self, namespace: str, pod: str, port: int, path: str) -> str:
        """Ask a pod through the API server, so that it works from wherever the tests run."""
        return self.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}")

    def http_post(self, namespace: str, pod: str, port: int, path: str, body: Object) -> Object:
        """Send JSON to a pod from within it and return its JSON; nothing where it answers nothing. It has Python."""
        asked = json.dumps({"url": f"http://127.0.0.1:{port}{path}", "body": body})
        where = ("exec", "--stdin", pod, "--namespace", namespace, "--")
        text = self.kubectl(*where, "python3", "-c", _POST, stdin=asked, timeout_s=120)
        return json.loads(text) if text.strip() else {}
