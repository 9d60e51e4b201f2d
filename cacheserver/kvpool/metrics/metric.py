# SPDX-License-Identifier: Apache-2.0
"""What a metric is."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Kind", "Metric"]


class Kind(StrEnum):
    """What a metric's value does over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric with all the series that it can have."""

    name: str
    kind: Kind
    unit: str
    """Base unit: seconds, bytes, tokens, chunks and so on."""

    help: str
    """What is measured, from when to when."""

    panel: str
    """Dashboard panel that shows it."""

    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Label names, each with every value that it can take."""

    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending; +Inf is understood."""
