# SPDX-License-Identifier: Apache-2.0
"""Every wired pod of the corpus is accepted by a real API server, at the level that is promised."""

from collections.abc import Iterator

import jsonpatch
import pytest
from tests.cluster.conftest import Caller, make_namespace, remove_namespace
from tests.unit.operator.wiring.corpus import Pod, outcome, place, read

from kvpool_operator.cluster import PODS
from kvpool_operator.errors import Forbidden

pytestmark = pytest.mark.cluster

CASES = read()


@pytest.fixture(scope="module")
def levels(api: Caller) -> Iterator[dict[str, str]]:
    """One namespace for each level of pod security."""
    made = {level: make_namespace(api, level) for level in ("privileged", "baseline", "restricted")}
    yield made
    for name in made.values():
        api(remove_namespace(api.cluster, name))


def promised(pod: Pod, pool: str) -> str:
    """The strictest level at which the user's own pod stands, wired."""
    what = place_of(pod)
    if what["memory"] == "host" or pool == "socket":
        return "privileged"
    return "restricted" if what["security"] == "restricted" else "baseline"


def place_of(pod: Pod) -> dict[str, str]:
    return next(place(c) for c in CASES if c.pod == pod)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_wired_pod_is_accepted_at_its_level(api: Caller, levels: dict[str, str], case) -> None:
    wired = jsonpatch.apply_patch(case.pod, list(outcome(case).patch))

    assert api(api.cluster.create(PODS, levels[promised(case.pod, case.pool)], wired, dry_run=True))


def test_a_pod_with_the_socket_is_refused_at_baseline(api: Caller, levels: dict[str, str]) -> None:
    case = next(c for c in CASES if c.pool == "socket" and place(c)["memory"] != "host")
    wired = jsonpatch.apply_patch(case.pod, list(outcome(case).patch))

    with pytest.raises(Forbidden, match="hostPath"):
        api(api.cluster.create(PODS, levels["baseline"], wired, dry_run=True))
