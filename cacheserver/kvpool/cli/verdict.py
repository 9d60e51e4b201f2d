# SPDX-License-Identifier: Apache-2.0
"""From numbers to words: why a server hits, or does not. Pure; docs/operations.md explains each verdict."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvpool.cli.numbers import Numbers
from kvpool.model.reasons import LookupReason

__all__ = ["Verdict", "VerdictKind", "judge"]


class VerdictKind(StrEnum):
    """What a server's numbers say about its hits."""

    DRAINING = "draining"
    STARTING = "starting"
    NO_CLIENT = "no-client"
    NO_REQUEST = "no-request"
    NO_LOOKUP = "no-lookup"
    PROMPTS_SHORT = "prompts-short"
    OTHER_LAYOUT = "other-layout"
    PIN_LIMIT = "pin-limit"
    INCOMPLETE = "incomplete"
    STORES_SKIPPED = "stores-skipped"
    NOTHING_STORED = "nothing-stored"
    EVICTED_FIRST = "evicted-first"
    NO_SHARED_PREFIX = "no-shared-prefix"
    HITS = "hits"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict, in words, with what to do about it."""

    kind: VerdictKind
    text: str

    @property
    def good(self) -> bool:
        """True if there is nothing to do."""
        return self.kind is VerdictKind.HITS


SKIP_REMEDY: Final = {
    "full": "raise l1.size_bytes",
    "pinned": "every slot is held; raise l1.size_bytes, or lower limits.pinned_share",
    "quota": "the tenant's share is used up; raise its quota",
    "abandoned": "engines began to store and gave up; look into their logs for timeouts and failed copies",
}


def judge(n: Numbers) -> Verdict:
    """Return the first thing that explains the numbers, nearest cause first."""
    return _not_serving(n) or _not_asked(n) or _hits(n) or _cannot_hit(n) or _nothing_to_hit(n)


def _not_serving(n: Numbers) -> Verdict | None:
    if n.draining:
        return Verdict(VerdictKind.DRAINING, "the server is shutting down and takes no new work")
    if not n.ready:
        return Verdict(VerdictKind.STARTING, "the server is starting and not ready yet; wait, or read its log")
    return None


def _not_asked(n: Numbers) -> Verdict | None:
    if n.lookups:
        return None
    if n.stored or n.present or n.skipped:
        return Verdict(
            VerdictKind.NO_LOOKUP,
            "engines store but never look up; unless they are meant to be producers only, check the role they run with",
        )
    if not n.clients:
        return Verdict(
            VerdictKind.NO_CLIENT,
            "no engine is connected; check that it runs with the kvpool connector and with this server's address",
        )
    return Verdict(VerdictKind.NO_REQUEST, "engines are connected but have not asked for anything yet; send a request")


def _hits(n: Numbers) -> Verdict | None:
    if not n.hit_tokens:
        return None
    text = f"hits: {n.hit_rate or 0:.1%} of the tokens looked up were found"
    return Verdict(VerdictKind.HITS, text)


def _cannot_hit(n: Numbers) -> Verdict | None:
    """Lookups that can never find anything, whatever is stored."""
    if all(reason in (LookupReason.SHORT, LookupReason.ENDED) for reason in n.lookups):
        return Verdict(
            VerdictKind.PROMPTS_SHORT,
            f"no prompt had a full chunk of {n.chunk_tokens} tokens; send longer prompts, or lower chunk_tokens",
        )
    if n.lookups.get(LookupReason.PIN_LIMIT):
        return Verdict(
            VerdictKind.PIN_LIMIT,
            "chunks are there but waiting requests hold as much as they may; raise limits.pinned_share, "
            "limits.pinned_client_share or l1.size_bytes",
        )
    if n.lookups.get(LookupReason.OTHER_LAYOUT):
        return Verdict(
            VerdictKind.OTHER_LAYOUT,
            "the model is stored under another layout (dtype, block size, parallel split, weights or versions differ); "
            "run the engines alike, or let the new ones fill the cache",
        )
    if n.lookups.get(LookupReason.INCOMPLETE):
        return Verdict(
            VerdictKind.INCOMPLETE,
            "some ranks or cache groups stored their part, others did not; check that every worker is connected",
        )
    return None


def _nothing_to_hit(n: Numbers) -> Verdict:
    if not n.stored and n.skipped:
        reason = max(n.skipped, key=lambda r: n.skipped[r])
        return Verdict(
            VerdictKind.STORES_SKIPPED,
            f"every store was skipped, mostly as {reason}; {SKIP_REMEDY.get(reason, 'see docs/operations.md')}",
        )
    if not n.chunks and not n.evicted:
        return Verdict(
            VerdictKind.NOTHING_STORED,
            "nothing is stored; a chunk is kept once its request was computed. If this stays, check the engines' role",
        )
    if n.evicted >= n.chunks:
        return Verdict(
            VerdictKind.EVICTED_FIRST,
            f"{n.evicted} chunks were evicted before anything asked for them again; raise l1.size_bytes",
        )
    return Verdict(
        VerdictKind.NO_SHARED_PREFIX,
        f"{n.chunks} chunks are held but no prompt began like one of them; prompts share no prefix, "
        "or their salt or adapter differs",
    )
