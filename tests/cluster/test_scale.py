# SPDX-License-Identifier: Apache-2.0
"""A thousand nodes: no failed pass, few writes, little memory. How long it takes is benchmarks/operator_scale.py's."""

import os
from collections.abc import Iterator

import pytest
from tests.chart.rendering import real_helm
from tests.cluster.control_plane import ControlPlane
from tests.cluster.scale import ALL, MIB, Outcome, Size, play, scale

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3000)]

MOST_WRITES = 10
MOST_RESIDENT = 300 * MIB
IDLE_S = 60.0


@pytest.fixture(scope="module")
def size() -> Size:
    """All of it; KVPOOL_SCALE_NODES=100 is a tenth of each, for a quick look."""
    tenth = int(os.environ.get("KVPOOL_SCALE_NODES", "1000")) // 20
    return Size(nodes=20 * tenth, pools=tenth, nodes_each=20, clients=100 * tenth)


@pytest.fixture(scope="module")
def found(control_plane: ControlPlane, size: Size) -> Iterator[Outcome]:
    """Resyncs come every 30 s, so that the minute of rest has some."""
    with scale(size, real_helm(), KVPOOL_OPERATOR_RESYNC_S="30") as scene:
        yield play(scene, IDLE_S)


def test_no_pass_fails_and_nothing_is_refused(found: Outcome) -> None:
    for phase in (found.create, *found.changes):
        assert phase.failures == ()
        assert phase.refused == ()


def test_a_change_costs_few_writes_whatever_the_number_of_nodes(found: Outcome, size: Size) -> None:
    for phase in found.changes:
        assert set(phase.writes) == {ALL, *(f"p{i:02}" for i in range(size.pools))}
        most, pool = phase.most_writes
        assert most <= MOST_WRITES, f"{phase.name}: {pool}: {phase.writes[pool]}"


def test_a_paced_change_deletes_each_server_once(found: Outcome, size: Size) -> None:
    deleted = {pool: writes["delete pods"] for pool, writes in found.paced.writes.items()}

    assert deleted == {pool: size.nodes if pool == ALL else size.nodes_each for pool in deleted}
    assert not [w for w in found.rolling.writes.values() if "delete pods" in w]


def test_the_operator_stays_small(found: Outcome) -> None:
    assert found.peak_bytes <= MOST_RESIDENT


def test_at_rest_it_writes_nothing_but_its_lease(found: Outcome) -> None:
    assert found.idle_writes == ()
