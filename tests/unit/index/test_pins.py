# SPDX-License-Identifier: Apache-2.0
import numpy as np

from kvpool.index.pins import PinLedger


def test_a_shared_slot_counts_once() -> None:
    ledger = PinLedger(8)
    assert ledger.pinned(np.array([1, 2])).tolist() == [False, False]

    ledger.pin(np.array([1, 2]), 2, 100)
    ledger.pin(np.array([2, 3]), 1, 100)

    assert ledger.bytes == 300
    assert ledger.pinned(np.array([0, 3])).tolist() == [False, True]


def test_a_slot_counts_until_its_last_pin_goes() -> None:
    ledger = PinLedger(8)
    ledger.pin(np.array([1]), 2, 100)

    ledger.unpin(np.array([1]), 1, 100)
    assert ledger.bytes == 100
    ledger.unpin(np.array([1]), 1, 100)

    assert ledger.bytes == 0
