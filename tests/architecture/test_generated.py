# SPDX-License-Identifier: Apache-2.0
"""`make generate` leaves the tree clean."""

import pytest
from tools.generate import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.path.name)
def test_a_generated_file_is_what_its_source_says(page) -> None:
    if page.slow:
        pytest.skip("make check compares it: it collects the whole test suite")

    assert page.path.read_text() == page.render()
