# SPDX-License-Identifier: Apache-2.0
"""The generated CRD: committed as generated, and structural by the rules that the API server has."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvpool_operator import crd
from kvpool_operator.spec.pool import Pool, PoolSpec
from kvpool_operator.spec.schema_types import Rule

FILE = Path(__file__).parents[3] / "crds" / "kvcachepools.yaml"
VERSION = crd.crd()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
ALLOWED = {
    "additionalProperties", "default", "description", "enum", "format", "items", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minimum", "pattern", "properties", "required", "type",
    "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-validations",
}  # fmt: skip


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[]")


def test_the_committed_file_is_the_generated_one() -> None:
    assert FILE.read_text() == crd.render(), "run `python -m kvpool_operator.crd crds/kvcachepools.yaml`"


def test_the_file_is_small_enough_for_every_way_to_apply_it() -> None:
    assert len(FILE.read_text()) < 200_000
    assert yaml.safe_load(FILE.read_text()) == crd.crd()


def test_every_node_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert set(node) <= ALLOWED, path
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path


def test_every_list_map_and_text_of_the_spec_is_bounded() -> None:
    bounds = {"string": ("maxLength", "enum"), "array": ("maxItems",)}
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        wanted = bounds.get(node.get("type", ""), ())
        if "additionalProperties" in node:
            wanted = ("maxProperties",)
        assert not wanted or any(w in node for w in wanted), path


def test_every_section_of_the_spec_can_be_left_out_but_the_size() -> None:
    spec = SCHEMA["properties"]["spec"]

    assert spec["required"] == ["l1"]
    assert spec["properties"]["l1"]["required"] == ["size"]
    assert all("default" in spec["properties"][s] for s in ("network", "update", "placement", "gpuAccess"))


def test_list_maps_have_required_keys() -> None:
    for path, node in nodes(SCHEMA):
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path


def test_rules_name_fields_that_exist_and_say_them_in_their_message() -> None:
    for path, node in nodes(SCHEMA):
        for rule in node.get("x-kubernetes-validations", []):
            target = node
            for name in filter(None, rule.get("fieldPath", "").split(".")):
                target = target["properties"][name]
            assert re.match(r"^[a-zA-Z0-9.]+(, [a-zA-Z]+)*( and [a-zA-Z]+)?: ", rule["message"]), (path, rule)


def test_columns_read_fields_that_the_status_has() -> None:
    status = SCHEMA["properties"]["status"]["properties"]
    for column in VERSION["additionalPrinterColumns"]:
        parts = column["jsonPath"].split(".")
        if parts[1] == "status":
            assert parts[2].split("[")[0] in status


def test_all_declared_rules_are_in_the_schema() -> None:
    declared = {r.rule for r in (*Pool.rules, *PoolSpec.rules) if isinstance(r, Rule)}
    found = {r["rule"] for _, n in nodes(SCHEMA) for r in n.get("x-kubernetes-validations", [])}

    assert declared <= found
