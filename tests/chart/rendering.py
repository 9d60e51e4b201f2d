# SPDX-License-Identifier: Apache-2.0
"""What helm makes of the chart, as plain values."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.chart import CHART
from tools.cluster_assets import ASSETS, find

Object = dict[str, Any]
Identity = tuple[str, str, str]
"""Kind, namespace (empty outside of any) and name."""

CRD_NAME = "kvcachepools.kvpool.dev"


class RefusedError(AssertionError):
    """Helm does not render; its words."""


class Helm:
    """The chart as one release after the other. *binary* is the real helm."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary

    def run(self, *arguments: str | Path, stdin: str = "") -> str:
        done = subprocess.run([self.binary, *arguments], input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError(done.stdout + done.stderr)
        return done.stdout

    def template(
        self, values: Object | None = None, *options: str, release: str = "pools", namespace: str = "system"
    ) -> list[Object]:
        """All objects of a release with *values*, those of `helm test` too."""
        text = self.run(
            *("template", release, CHART, "--namespace", namespace, "--values", "-", *options),
            stdin=json.dumps(values or {}),
        )
        return [body for body in yaml.safe_load_all(text) if body]

    def notes(self, values: Object | None = None, release: str = "pools", namespace: str = "system") -> str:
        """What a person reads after the installation."""
        text = self.run(
            *("install", release, CHART, "--namespace", namespace, "--dry-run=client", "--values", "-"),
            stdin=json.dumps(values or {}),
        )
        return text.partition("\nNOTES:\n")[2]


def real_helm() -> Helm:
    """The helm of this machine; without one the test is skipped, or fails where one is expected."""
    if found := find(ASSETS["helm"]):
        return Helm(found)
    reason = "helm is missing; run `python tools/cluster_assets.py --only control-plane`"
    if os.environ.get("KVPOOL_EXPECT_CLUSTER"):
        pytest.fail(reason)
    pytest.skip(reason)


def identity(body: Object) -> Identity:
    return body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def only(objects: list[Object], kind: str, *, webhook: bool = False) -> Object:
    """The only object of *kind* that belongs to the operator, or to its admission server."""
    (found,) = [o for o in of_kind(objects, kind) if of_webhook(o) is webhook]
    return found


def of_webhook(body: Object) -> bool:
    """True for what belongs to the admission server."""
    return body["metadata"]["labels"].get("app.kubernetes.io/component") == "webhook"


def operator(objects: list[Object]) -> Object:
    """The operator's container."""
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def environment(objects: list[Object]) -> dict[str, str | None]:
    """The operator's variables; None for what only a running pod has."""
    return {e["name"]: e.get("value") for e in operator(objects)["env"]}


def rights(rules: list[Object]) -> Iterator[tuple[str, str, str, str]]:
    """Each single right of *rules*: group, resource, verb, and the only name it is for or empty."""
    for rule in rules:
        assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames") or [""]:
                        yield group, resource, verb, name
