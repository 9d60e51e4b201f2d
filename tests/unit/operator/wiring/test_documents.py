# SPDX-License-Identifier: Apache-2.0
"""docs/wiring.md names every reason, shows the real flag, and its examples are wired."""

import re
from pathlib import Path

import yaml
from tests.unit.operator.wiring.corpus import situation

from kvpool_operator.observed import MISSED, OUT_OF_DATE
from kvpool_operator.wiring import FLAG, Note, Skip, wire

GUIDE = (Path(__file__).parents[4] / "docs" / "wiring.md").read_text()


def test_every_reason_is_explained_once_and_no_other() -> None:
    explained = re.findall(r"^\| `([A-Z]\w+)` \| ", GUIDE, re.MULTILINE)

    assert sorted(explained) == sorted([*Skip, *Note, MISSED, OUT_OF_DATE])


def test_the_flag_is_the_one_that_warnings_show() -> None:
    assert FLAG in GUIDE


def test_its_example_is_wired_by_its_label_alone() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    template = yaml.safe_load(text)["spec"]["template"]

    outcome = wire(template, situation("copied"))

    assert (outcome.skip, outcome.notes) == (None, ())
    assert any(o["path"].startswith("/spec/containers/0/args") for o in outcome.patch)
