# SPDX-License-Identifier: Apache-2.0
"""How an engine stands to its cache servers, read from the engine's own metrics page."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.numbers import labels_of, total
from kvpool.connector.statistics import COUNTERS, GAUGES, SERVER, UNCACHED, Row

__all__ = ["EngineView", "metrics_of", "view_of"]

DEADLINE_S: Final = 5.0
_PREFIX: Final = "vllm:"


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's page tells of kvpool; counts are since the engine's start."""

    servers: tuple[dict[str, str], ...]
    """Each server: ``engine`` (its number among data-parallel ones), ``server``, and ``state``: up, or why it is not
    used."""

    uncached: tuple[dict[str, str], ...]
    """Halves of the connector that run uncached: ``engine``, ``half`` and ``reason``."""

    numbers: dict[str, int]
    """By the keys of the connector's statistics."""

    @property
    def hit_rate(self) -> float | None:
        """Tokens that were loaded over tokens looked up; None before the first lookup."""
        asked = self.numbers["lookup_tokens"]
        return self.numbers["hit_tokens"] / asked if asked else None


def metrics_of(url: str) -> dict[str, float]:
    """Fetch the kvpool series of the engine at *url*: value by name and labels, as on its page.

    Raises:
        UsageError: *url* is none of http or https.
        Failure: nobody answers there, or an engine without kvpool; the text says what to do.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {url}: name the engine's HTTP address, such as http://localhost:8000")
    page = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(page, timeout=DEADLINE_S) as answer:  # noqa: S310 - checked above
            text = answer.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        raise Failure(f"--engine {page}: {e.code} {e.reason}; is it the address of a vLLM server?") from e
    except (OSError, ValueError, http.client.HTTPException) as e:  # also URLError, and what is no address at all
        raise Failure(f"--engine {page}: {getattr(e, 'reason', e)}; name the engine's HTTP address") from e
    found = dict(_series(text))
    if not found:
        raise Failure(f"--engine {page}: no metrics of kvpool; has the engine the connector, and statistics on?")
    return found


def view_of(series: Mapping[str, float]) -> EngineView:
    """Read what ``metrics_of`` returns."""
    return EngineView(
        servers=tuple(_shown(series, SERVER, "engine", "server", "state")),
        uncached=tuple(_shown(series, UNCACHED, "engine", "half", "reason")),
        numbers={key: total(series, _name(row, "_total")) for key, row in COUNTERS.items()}
        | {key: total(series, _name(row)) for key, row in GAUGES.items()},
    )


def _series(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line.startswith(f"{_PREFIX}kvpool_"):
            key, _, value = line.rpartition(" ")
            yield key, float(value)


def _shown(series: Mapping[str, float], row: Row, *labels: str) -> Iterator[dict[str, str]]:
    """Labels of the series of a metric that are not 0."""
    for key, value in sorted(series.items()):
        if value and key.partition("{")[0] == _name(row):
            found = labels_of(key)
            yield {label: found.get(label, "") for label in labels}


def _name(row: Row, suffix: str = "") -> str:
    return f"{_PREFIX}{row.name}{suffix}"
