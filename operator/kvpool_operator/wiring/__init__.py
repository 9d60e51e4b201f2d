# SPDX-License-Identifier: Apache-2.0
"""Pure: a pod that opted in and its pool in, a JSON patch or the reason why not out. docs/wiring.md is for users."""

from kvpool_operator.wiring.patch import Operation, difference
from kvpool_operator.wiring.reasons import BY_HAND, FLAG, REMEDIES, Note, Skip
from kvpool_operator.wiring.wire import Outcome, Situation, wanted_pool, wire, wiring_mark

__all__ = [
    "BY_HAND",
    "FLAG",
    "REMEDIES",
    "Note",
    "Operation",
    "Outcome",
    "Situation",
    "Skip",
    "difference",
    "wanted_pool",
    "wire",
    "wiring_mark",
]
