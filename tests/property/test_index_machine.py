# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from tests.property.index_machine import Machine


@pytest.mark.behaviour("R024", "R028", "D002", "D004", "D024", "D106")
def test_twenty_thousand_random_operations_show_no_wrong_byte() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    machine = Machine(seed)

    try:
        machine.run(20_000)
    except Exception as e:
        e.add_note(f"python -m tests.property.index_machine --ops 20000 --seed {seed}")
        raise

    assert machine.counts["chunks verified"] > 100
    assert machine.counts["copies verified"] > 5
