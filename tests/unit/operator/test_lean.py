# SPDX-License-Identifier: Apache-2.0
"""Pages of pods without what nobody looks at: nothing that judgements are made of may be lost."""

import json
from typing import Any

import msgspec
import pytest

from kvpool_operator.lean import page, raw

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "a",
        "namespace": "models",
        "uid": "u-1",
        "resourceVersion": "7",
        "labels": {"kvpool.dev/pool": "a"},
        "annotations": {"kvpool.dev/wired": "mark"},
        "creationTimestamp": "2030-01-01T00:00:00Z",
        "deletionTimestamp": "2030-01-01T00:01:00Z",
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u-2", "controller": True}
        ],
        "managedFields": [{"manager": "kube-controller-manager", "fieldsV1": {"f:metadata": {}}}],
    },
    "spec": {
        "nodeName": "n1",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "containers": [{"name": "server", "env": [{"name": "A", "value": "b"}]}],
    },
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}]},
}


def read(*items: dict[str, Any], **metadata: Any) -> list[dict[str, Any]]:
    text = json.dumps({"kind": "PodList", "metadata": {"resourceVersion": "9", **metadata}, "items": items})
    return [raw(found) for found in page(text).items or ()]


def test_what_is_looked_at_stays_as_it_was() -> None:
    (found,) = read(POD)

    kept = {k: v for k, v in POD["metadata"].items() if k not in ("managedFields", "resourceVersion")}
    assert found["metadata"] == kept
    assert found["spec"] == {k: POD["spec"][k] for k in ("nodeName", "affinity")}
    assert found["status"] == POD["status"]


def test_what_is_absent_stays_absent() -> None:
    (found,) = read({"metadata": {"name": "a"}, "spec": {}})

    assert found == {"metadata": {"name": "a"}, "spec": {}, "status": {}}


@pytest.mark.parametrize("items", ["null", "[]"])
def test_an_empty_list_has_no_items(items: str) -> None:
    assert not page(f'{{"metadata": {{}}, "items": {items}}}').items


def test_a_page_tells_what_follows_it() -> None:
    assert page('{"metadata": {"continue": "more"}, "items": []}').following == "more"
    assert page('{"metadata": {}, "items": []}').following == ""


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"items": [7]}', '{"items": [{"metadata": {}}]}'])
def test_what_is_no_list_is_said_to_be_none(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        page(text)
