# SPDX-License-Identifier: Apache-2.0
import pytest

from kvpool.metrics.numbers import Numbers

QUEUE = "kvpool_queue_seconds"


def test_add_counts_and_put_sets() -> None:
    numbers = Numbers()

    numbers.add("kvpool_evicted_chunks_total", 2)
    numbers.add("kvpool_evicted_chunks_total")
    numbers.put("kvpool_chunks", 7)

    assert numbers.published()["kvpool_evicted_chunks_total"] == 3
    assert numbers.published()["kvpool_chunks"] == 7


@pytest.mark.parametrize("key", ["kvpool_nonsense", 'kvpool_lookups_total{reason="because"}', "kvpool_lookups_total"])
def test_a_series_outside_the_catalogue_is_refused(key: str) -> None:
    numbers = Numbers()

    with pytest.raises(KeyError):
        numbers.add(key)
    with pytest.raises(KeyError):
        numbers.put(key, 1)


def test_put_all_takes_a_whole_dictionary() -> None:
    numbers = Numbers()

    numbers.put_all({"kvpool_chunks": 1, "kvpool_leases": 2})

    assert (numbers.published()["kvpool_chunks"], numbers.published()["kvpool_leases"]) == (1, 2)


def test_histogram_buckets_are_cumulative() -> None:
    numbers = Numbers()
    queue = numbers.histogram(QUEUE)

    for value in (0.0, 0.0001, 0.0003, 5.0):
        queue.observe(value)

    shown = numbers.published()
    assert shown[f'{QUEUE}_bucket{{le="0.0001"}}'] == 2
    assert shown[f'{QUEUE}_bucket{{le="0.0005"}}'] == 3
    assert shown[f'{QUEUE}_bucket{{le="1"}}'] == 3
    assert shown[f'{QUEUE}_bucket{{le="+Inf"}}'] == shown[f"{QUEUE}_count"] == 4
    assert shown[f"{QUEUE}_sum"] == pytest.approx(5.0004)


def test_what_was_published_does_not_change() -> None:
    numbers = Numbers()
    before = numbers.published()

    numbers.add("kvpool_evicted_chunks_total")

    assert before["kvpool_evicted_chunks_total"] == 0
    with pytest.raises(TypeError):
        before["kvpool_evicted_chunks_total"] = 9  # type: ignore[index]
