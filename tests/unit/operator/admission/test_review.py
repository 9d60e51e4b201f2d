# SPDX-License-Identifier: Apache-2.0
"""Reviews as the API server sends them."""

import base64
import json
from typing import Any

import jsonpatch
import pytest
from tests.unit.operator.cases import PUBLIC_KEY
from tests.unit.operator.wiring.corpus import Case, outcome, pool_named, read

from kvpool_operator.admission.pools import Known
from kvpool_operator.admission.review import BadReviewError, Reviewer

CASES = {c.name: c for c in read()}


def review(pod: Any, namespace: str = "models") -> bytes:
    request = {"uid": "u-1", "namespace": namespace, "operation": "CREATE", "object": pod}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def known(case: Case) -> dict[tuple[str, str], Known]:
    pool = pool_named(case.pool)
    return {pool.key: (pool, PUBLIC_KEY)} if pool else {}


def answer(case: Case, pod: Any = None, *, host_folders: bool = False) -> tuple[dict[str, Any], str]:
    reviewer = Reviewer(known(case).get, "kvpool-payload:0.1.0")
    reviewed = reviewer(review(case.pod if pod is None else pod), host_folders=host_folders)
    return json.loads(reviewed.body)["response"], reviewed.result


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
def test_the_answer_is_what_wiring_says(case: Case) -> None:
    expected = outcome(case)

    found, result = answer(case, host_folders=case.pool == "socket")

    assert (found["uid"], found["allowed"]) == ("u-1", True)
    assert found["patchType"] == "JSONPatch"
    assert json.loads(base64.b64decode(found["patch"])) == list(expected.patch)
    assert tuple(found.get("warnings", ())) == expected.warnings
    assert result == ("skipped" if expected.skip else "noted" if expected.notes else "wired")


def first(pool: str) -> Case:
    return next(c for c in CASES.values() if c.pool == pool)


def test_a_required_pod_that_cannot_be_wired_is_refused_in_words() -> None:
    case = first("far-stranger")
    labels = {**case.pod["metadata"]["labels"], "kvpool.dev/wiring": "required"}
    pod = {**case.pod, "metadata": {**case.pod["metadata"], "labels": labels}}

    found, result = answer(case, pod)

    assert (found["allowed"], result) == (False, "refused")
    assert "clients.allowedNamespaces" in found["status"]["message"]
    assert "patch" not in found


def test_nothing_to_do_is_no_patch() -> None:
    case = first("near")
    wired = jsonpatch.apply_patch(case.pod, case.patch)

    found, _ = answer(case, wired)

    assert found["allowed"] is True
    assert "patch" not in found


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"{}", b'{"request": {"uid": 1}}', b'{"request": {"uid": "1", "namespace": "a", "object": 3}}'],
)
def test_what_is_no_review_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(BadReviewError):
        Reviewer(lambda _: None, "")(raw, host_folders=False)
