# SPDX-License-Identifier: Apache-2.0
"""A server starts without packages that it does not use, and finds them afterwards."""

import importlib
import subprocess
import sys

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvpool.cli.lean import hidden
from kvpool.server.faces import METRICS_TYPE

START = """
import sys
from kvpool.cli.lean import hidden
with hidden("rich"):
    import kvpool.server.compose
print([name for name in ("rich", "pygments", "prometheus_client") if name in sys.modules])
import rich, prometheus_client
"""


def test_a_hidden_package_cannot_be_imported_until_the_end() -> None:
    sys.modules.pop("colorsys", None)
    with hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")

    assert importlib.import_module("colorsys")


def test_what_is_imported_already_stays() -> None:
    before = sys.modules["json"]
    with hidden("json"):
        assert importlib.import_module("json") is before

    assert sys.modules["json"] is before


def test_a_server_is_up_before_it_imports_what_only_a_scrape_or_a_terminal_needs() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_type_of_a_scrape_is_what_its_package_writes() -> None:
    assert METRICS_TYPE == CONTENT_TYPE_PLAIN_0_0_4
