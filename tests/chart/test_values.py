# SPDX-License-Identifier: Apache-2.0
"""What the values' schema refuses, and that it knows every value."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.chart.rendering import Helm, Object, RefusedError
from tools.chart import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
REFUSED: list[tuple[Object, str]] = [
    ({"watchNamespace": ["a"]}, "watchNamespace"),
    ({"webhooks": {}}, "webhooks"),
    ({"watchNamespaces": "a"}, "watchNamespaces"),
    ({"watchNamespaces": ["A"]}, "watchNamespaces"),
    ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
    ({"watchNamespaces": ["a,b"]}, "watchNamespaces"),
    ({"crds": {"enabled": True}}, "crds"),
    ({"crds": {"install": "yes"}}, "install"),
    ({"image": {"repository": "x"}}, "image"),
    ({"image": {"registry": "registry.example/"}}, "registry"),
    ({"image": {"operator": {"repository": "x:1"}}}, "repository"),
    ({"image": {"operator": {"repository": ""}}}, "repository"),
    ({"image": {"server": {"digest": "latest"}}}, "digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"image": {"pullSecrets": ["s"]}}, "pullSecrets"),
    ({"image": {"pullSecrets": [{}]}}, "pullSecrets"),
    ({"replicas": -1}, "replicas"),
    ({"replicas": "2"}, "replicas"),
    ({"resources": {"limit": {}}}, "resources"),
    ({"serviceAccount": {"create": False}}, "serviceAccount"),
    ({"rbac": {"cluster": True}}, "rbac"),
    ({"priorityClass": {"value": 2000000000}}, "value"),
    ({"metrics": {"service": False, "serviceMonitor": {"enabled": True}}}, "metrics"),
    ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
    ({"podLabels": {"a": 1}}, "podLabels"),
    ({"tolerations": [{"keys": "x"}]}, "tolerations"),
    ({"affinity": {"nodeAffinities": {}}}, "affinity"),
    ({"webhook": {"timeoutSeconds": 30}}, "timeoutSeconds"),
    ({"webhook": {"replicas": 0}}, "replicas"),
    ({"webhook": {"certManager": {"issuerRef": {"kind": "Own"}}}}, "kind"),
]


@pytest.mark.parametrize(("values", "named"), REFUSED, ids=json.dumps)
def test_a_wrong_value_is_refused_by_name(helm: Helm, values: Object, named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        helm.template(values)


def objects(node: Any) -> Iterator[Object]:
    """All object schemas."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for inner in node.values():
            yield from objects(inner)


def test_objects_are_closed() -> None:
    """But for maps, and for what is Kubernetes' own to check."""
    for schema in objects(SCHEMA):
        if "properties" in schema:
            assert schema["additionalProperties"] is False


def resolved(schema: Object) -> Object:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def paths(values: Object, schema: Object, start: str = "") -> Iterator[tuple[str, bool, bool]]:
    """Each value's path, whether it is in values.yaml, and whether in the schema."""
    known = resolved(schema).get("properties", {})
    for name in sorted(set(values) | set(known)):
        yield f"{start}{name}", name in values, name in known
        if isinstance(values.get(name), dict) and name in known and resolved(known[name]).get("properties"):
            yield from paths(values[name], known[name], f"{start}{name}.")


def test_every_value_has_a_default_and_a_schema() -> None:
    expected_without_default = {"global", "affinity.nodeAffinity", "affinity.podAffinity", "affinity.podAntiAffinity"}
    expected_without_default |= {f"webhook.certManager.issuerRef.{part}" for part in ("group", "kind", "name")}
    wrong = {path for path, has_default, has_schema in paths(VALUES, SCHEMA) if not (has_default and has_schema)}

    assert wrong == expected_without_default


def test_every_value_is_used() -> None:
    templates = "\n".join(f.read_text() for f in (CHART / "templates").rglob("*") if f.is_file())
    whole = {"resources", "affinity", "webhook.resources", "webhook.certManager.issuerRef"}  # handed on as they are
    shared = {"image.operator", "image.server", "image.payload"}  # read by the helper that they share

    for path, _, _ in paths(VALUES, SCHEMA):
        parent, _, last = path.rpartition(".")
        used = (
            f".Values.{path}" in templates
            or f"$values.{path}" in templates
            or parent in whole
            or (parent in shared and f"$image.{last}" in templates)
        )
        assert used or path == "global", path
