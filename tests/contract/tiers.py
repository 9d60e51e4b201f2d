# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the Tier port, for the contract suite: how to make one that holds given chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.fakes.tier import FakeTier

from kvpool.engine.ports import Tier, TierKey


@dataclass(frozen=True)
class Factory:
    """Makes a tier that holds some chunks, and lets its fetches end."""

    make: Callable[[Mapping[TierKey, bytes]], Tier]
    run: Callable[[Tier], None]


def _fake(kept: Mapping[TierKey, bytes]) -> FakeTier:
    tier = FakeTier()
    tier.kept.update(kept)
    return tier


def _finish(tier: Tier) -> None:
    assert isinstance(tier, FakeTier)
    tier.finish()


FACTORIES = {"fake": Factory(_fake, _finish)}
