# SPDX-License-Identifier: Apache-2.0
"""Pods that opted in and are not wired: told to whoever made them, and made anew where the pool says so.

An eviction helps only if admission will see the next pod. So an owner's first pod is a trial: its others follow once a
pod that was made after it is wired, else the next trial waits ever longer.
"""

import datetime as dt
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool_operator.cluster import Cluster
from kvpool_operator.errors import OperatorError
from kvpool_operator.observed import MISSED, OUT_OF_DATE, ClientPod
from kvpool_operator.spec import Pool
from kvpool_operator.wiring import BY_HAND, FLAG, REMEDIES, Skip

__all__ = ["History", "Repair", "choose", "helps"]

_GAP_S: Final = 10.0
"""Least time between two evictions of one pool."""
_GRACE_S: Final = 30.0
"""A pod younger than this is left alone: its owner may still be at work."""
_FIRST_WAIT_S: Final = 600.0
_LONGEST_WAIT_S: Final = 6 * 3600.0
_MOST_TOLD: Final = 20
"""Events of one pass; the rest is told by later ones."""

_TEXTS: Final[dict[str, str]] = {
    MISSED: "the pod was created while no admission server answered; it runs without the cache until it is made anew",
    OUT_OF_DATE: "the pool has moved since the pod was wired; it runs without the cache until it is made anew",
    **{str(reason): text for reason, text in REMEDIES.items()},
}


@dataclass(slots=True)
class _Trial:
    at: dt.datetime
    count: int


@dataclass(slots=True)
class History:
    """What was done about the pods of one pool."""

    evicted_at: dt.datetime | None = None
    trials: dict[str, _Trial] = field(default_factory=dict)
    """By their owners' uids."""
    told: set[tuple[str, str]] = field(default_factory=set)
    """Uid of an owner or a pod, and reason."""

    def note(self, pod: ClientPod, now: dt.datetime) -> None:
        """*pod* was evicted."""
        self.evicted_at = now
        if pod.owner is not None:
            before = self.trials.get(pod.owner.uid)
            self.trials[pod.owner.uid] = _Trial(now, 1 if before is None else before.count + 1)


def helps(pool: Pool, pod: ClientPod) -> bool:
    """True if *pod*, made anew, would be wired, as far as its reason tells."""
    causes = (MISSED, OUT_OF_DATE, Skip.POOL_NOT_READY, Skip.NAMESPACE_NOT_ALLOWED)
    return not pod.wired and pool.admits(pod.namespace) and any(reason in causes for reason in pod.reasons)


def choose(pool: Pool, pods: Sequence[ClientPod], history: History, now: dt.datetime) -> ClientPod | None:
    """The pod to evict now, if any."""
    if not pool.spec.clients.rewire_unwired:
        return None
    if history.evicted_at is not None and (now - history.evicted_at).total_seconds() < _GAP_S:
        return None
    ready = [p for p in pods if _may_go(pool, p, now) and _is_due(p, pods, history, now)]
    return min(ready, key=lambda p: (p.made_at, p.namespace, p.name), default=None)


def _may_go(pool: Pool, pod: ClientPod, now: dt.datetime) -> bool:
    if pod.owner is None or pod.deleting or not pod.made_at or not helps(pool, pod):
        return False
    age_s: float = (now - dt.datetime.fromisoformat(pod.made_at)).total_seconds()
    return age_s >= _GRACE_S


def _is_due(pod: ClientPod, pods: Iterable[ClientPod], history: History, now: dt.datetime) -> bool:
    trial = history.trials.get(pod.owner.uid) if pod.owner else None
    if trial is None:
        return True
    if any(p.wired and p.made_at and dt.datetime.fromisoformat(p.made_at) >= _second(trial.at) for p in pods):
        return True
    wait_s: float = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (trial.count - 1))
    return (now - trial.at).total_seconds() >= wait_s


def _second(moment: dt.datetime) -> dt.datetime:
    """Pods say when they were made in whole seconds."""
    return moment.replace(microsecond=0)


class Repair:
    """Looks after the unwired pods of all pools. One event loop.

    Args:
        tell: posts an Event on what made a pod: the pod, a reason, a text.
        done: told of each eviction.
    """

    def __init__(
        self,
        cluster: Cluster,
        wall: Callable[[], dt.datetime],
        tell: Callable[[ClientPod, str, str], Awaitable[None]],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._wall = wall
        self._tell = tell
        self._done = done
        self._histories: dict[str, History] = {}

    def forget(self, uid: str) -> None:
        """The pool is gone."""
        self._histories.pop(uid, None)

    async def __call__(self, pool: Pool, pods: Sequence[ClientPod]) -> str:
        """One look at *pods* of *pool*; returns what kept an unwired pod from being evicted, or nothing."""
        history = self._histories.setdefault(pool.uid, History())
        await self._say(pods, history)
        pod = choose(pool, pods, history, self._wall())
        if pod is None:
            return ""
        try:
            gone = await self._cluster.evict(pod.namespace, pod.name, pod.uid)
        except OperatorError as e:  # a disruption budget, or a missing right: the next pass tries again
            return f"{pod.namespace}/{pod.name} cannot be evicted: {e}"
        if gone:
            history.note(pod, self._wall())
            self._done()
        return ""

    async def _say(self, pods: Sequence[ClientPod], history: History) -> None:
        """Tell each owner of each reason once, as long as it lasts."""
        wanted = {(p.owner.uid if p.owner else p.uid, r): p for p in pods for r in p.reasons}
        history.told &= wanted.keys()
        new = [(key, pod) for key, pod in wanted.items() if key not in history.told]
        for key, pod in new[:_MOST_TOLD]:
            await self._tell(pod, key[1], _text(key[1]))
            history.told.add(key)


def _text(reason: str) -> str:
    text = _TEXTS.get(reason, "see docs/wiring.md")
    return f"{text}: {FLAG}" if reason in {str(n) for n in BY_HAND} else text
