# SPDX-License-Identifier: Apache-2.0
"""Raw resources in, typed pools out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.cases import with_identity

from kvpool_operator.errors import InvalidPool
from kvpool_operator.spec import PoolStatus, dump, parse_pool, parse_status
from kvpool_operator.spec.quantity import Duration, Size, binary


def body(**spec: Any) -> dict[str, Any]:
    return with_identity({"metadata": {"name": "a"}, "spec": {"l1": {"size": "1Gi"}, **spec}})


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1Gi", 1 << 30), ("1.5Gi", 3 << 29), ("500M", 500_000_000), (4096, 4096), ("4096", 4096), ("2k", 2000)],
)
def test_sizes_become_bytes(text: str | int, size_bytes: int) -> None:
    assert Size.parse(text) == size_bytes


@pytest.mark.parametrize("text", ["", "1GiB", "-1Gi", "1e3", "Gi", True, None, 1.5e300])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="no size"):
        Size.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2m", 120), ("1h", 3600), ("250ms", 0.25)])
def test_durations_become_seconds(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "90", 90, "1d", "-1s", "1.5s"])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="no duration"):
        Duration.parse(text)


@given(st.integers(0, 1 << 60))
def test_text_for_people_is_short_and_close(size_bytes: int) -> None:
    text = binary(size_bytes)

    assert len(text) <= 7
    assert Size.parse(text) == pytest.approx(size_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ({"l1": {}}, "spec.l1"),
        ({"l1": {"size": "much"}}, "spec.l1.size"),
        ({"network": {"port": 80}}, "spec.network.port"),
        ({"update": {"settle": "soon"}}, "spec.update.settle"),
        ({"gpuAccess": {"mode": "Magic"}}, "spec.gpuAccess.mode"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(spec: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidPool, match=where.replace(".", r"\.")):
        parse_pool(body(**spec))


def test_a_pool_without_identity_is_refused() -> None:
    with pytest.raises(InvalidPool, match="uid"):
        parse_pool({"metadata": {"name": "a", "namespace": "b"}, "spec": {"l1": {"size": "1Gi"}}})


def test_fields_of_a_newer_schema_are_let_through() -> None:
    assert parse_pool(body(tiers=[{"name": "disk"}], l1={"size": "1Gi", "hue": 3})).spec.l1.size == 1 << 30


def test_a_status_survives_the_round_trip() -> None:
    status = PoolStatus(observed_generation=3, capacity="1Gi", versions={"0.1.0": 2})

    assert parse_status({"status": dump(status)}) == status


@pytest.mark.parametrize("status", [None, {}, {"servers": 3}, {"observedGeneration": "x"}])
def test_an_unreadable_status_counts_as_none(status: Any) -> None:
    assert parse_status({"status": status}) == PoolStatus()
