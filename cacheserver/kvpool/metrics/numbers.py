# SPDX-License-Identifier: Apache-2.0
"""The values of every series of the catalogue, kept by one thread and published as copies to all others."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType

from kvpool.metrics.catalogue import CATALOGUE, Kind, Metric, all_series, series

__all__ = ["Histogram", "Numbers"]


class Histogram:
    """How often values fell into each bucket of one metric without labels.

    Thread: the owner alone. ``observe`` runs for every request and therefore only counts; sums are made at publication.
    """

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self._keys = tuple(series(metric))
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def values(self) -> Iterator[tuple[str, float]]:
        """Yield each series of the histogram: cumulative buckets, sum, count."""
        cumulative = list(accumulate(self._counts))
        return zip(self._keys, (*cumulative, self._sum, cumulative[-1]), strict=True)


class Numbers:
    """One number for each series, 0 from the start.

    Thread: the owner alone (the request loop); ``published`` hands out copies that any thread may read.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = dict.fromkeys(all_series(), 0.0)
        self._histograms = {m.name: Histogram(m) for m in CATALOGUE if m.kind is Kind.HISTOGRAM}

    def add(self, key: str, amount: float = 1.0) -> None:
        """Count *amount* more.

        Raises:
            KeyError: the catalogue has no such series; always our own mistake.
        """
        self._values[key] += amount

    def put(self, key: str, value: float) -> None:
        """Set a gauge, or a counter that somebody else keeps.

        Raises:
            KeyError: the catalogue has no such series; always our own mistake.
        """
        if key not in self._values:
            raise KeyError(key)
        self._values[key] = value

    def put_all(self, values: Mapping[str, float]) -> None:
        """``put`` each of *values*.

        Raises:
            KeyError: the catalogue lacks one of them; the values before it are set.
        """
        for key, value in values.items():
            self.put(key, value)

    def histogram(self, name: str) -> Histogram:
        """Return the histogram *name*, to be kept by whoever observes.

        Raises:
            KeyError: the catalogue has no such histogram.
        """
        return self._histograms[name]

    def published(self) -> Mapping[str, float]:
        """Return a read-only copy of all values as they are now."""
        values = dict(self._values)
        for histogram in self._histograms.values():
            values.update(histogram.values())
        return MappingProxyType(values)
