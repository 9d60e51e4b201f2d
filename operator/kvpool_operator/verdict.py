# SPDX-License-Identifier: Apache-2.0
"""Pure: does the pool hit, and if not, why not and what to do."""

from dataclasses import dataclass
from typing import Final, Literal

from kvpool_operator.observed import Observed, Window

__all__ = ["Finding", "hitting"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement: its truth, a reason in one word, and the reason in words."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


_WHY: Final = {
    "other_layout": (
        "OtherLayout",
        "what is stored was made with another layout, dtype or parallel split; engines that should share must be alike",
    ),
    "incomplete": ("ShardsMissing", "some ranks' parts of the chunks are missing; look for ranks that do not store"),
    "pin_limit": ("PinLimit", "more is held than waiting requests may pin; a larger l1.size helps"),
    "short": ("PromptsTooShort", "prompts are shorter than one chunk; a pool with a smaller chunkTokens would hit"),
    "ended": ("RequestsEndFirst", "requests end before their lookups are answered; engines or servers are overloaded"),
}
"""By why most lookups end without a hit."""


def hitting(seen: Observed) -> Finding:
    """Judge the last window's traffic of all servers together."""
    window = seen.window
    lookups = sum(window.lookups.values())
    if not seen.stats:
        return Finding("Unknown", "NoReports", "no server has reported yet")
    if not lookups:
        if not any(s.clients for s in seen.stats):
            return Finding("Unknown", "NoClients", "no engine is connected; see ClientsWired")
        return Finding("Unknown", "NoTraffic", "no engine has asked lately")
    if window.hit_tokens:
        share = 100 * window.hit_tokens / max(1, window.prompt_tokens)
        return Finding("True", "Hitting", f"{share:.0f} % of prompt tokens were found")
    return _why_not(seen, window, lookups)


def _why_not(seen: Observed, window: Window, lookups: int) -> Finding:
    reason, count = max(sorted(window.lookups.items()), key=lambda item: item[1])
    if reason in _WHY:
        name, advice = _WHY[reason]
        return Finding("False", name, f"{count} of {lookups} lookups: {advice}")
    if not any(s.used_bytes for s in seen.stats) and not window.stored_chunks:
        return Finding("False", "NothingStored", "nothing is stored; check the engines' role and their logs")
    if window.evicted_chunks > window.stored_chunks // 2:
        return Finding(
            "False",
            "EvictedBeforeReuse",
            f"{window.evicted_chunks} chunks were evicted while {window.stored_chunks} were stored; enlarge l1.size",
        )
    return Finding(
        "False",
        "NoReuse",
        "prompts share no stored prefix on their node; check salts, templates with changing starts, and routing",
    )
