# SPDX-License-Identifier: Apache-2.0
"""What a person reads after the installation: the next step works as it stands there."""

import re

import pytest
import yaml
from tests.chart.rendering import Helm, Object

from kvpool_operator.desired.names import POOL_LABEL
from kvpool_operator.spec import Pool, parse_pool


def sample(notes: str) -> Pool:
    """The pool that the notes tell people to apply."""
    found = re.search(r"^kubectl apply -f - <<EOF\n(.*?)^EOF$", notes, re.MULTILINE | re.DOTALL)
    assert found, notes
    body = yaml.safe_load(found[1])
    body["metadata"] |= {"uid": "u", "generation": 1}
    return parse_pool(body)


def test_the_sample_is_a_pool(helm: Helm) -> None:
    pool = sample(helm.notes())

    assert (pool.name, pool.namespace) == ("main", "default")


def test_the_sample_is_where_the_operator_looks(helm: Helm) -> None:
    notes = helm.notes({"watchNamespaces": ["team", "other"]})

    assert sample(notes).namespace == "team"
    assert "team, other" in notes


def test_the_label_wires_an_engine_to_the_sample(helm: Helm) -> None:
    (label,) = re.findall(r"^    (kvpool\.dev/pool: \S+)$", helm.notes(), re.MULTILINE)

    assert yaml.safe_load(label) == {POOL_LABEL: sample(helm.notes()).name}
    assert sample(helm.notes()).spec.clients.payload is not None, "no image of vLLM has the connector by itself"


def test_the_commands_name_this_release(helm: Helm) -> None:
    assert "helm test mine --namespace place" in helm.notes(release="mine", namespace="place")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"crds": {"install": False}}, "does not bring the CRD"),
        ({"rbac": {"create": False}}, "brings no roles"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "or nothing is scraped"),
        ({"webhook": {"enabled": False}}, "nothing is wired"),
    ],
    ids=["crd", "roles", "monitor", "webhook"],
)
def test_what_is_missing_is_said(helm: Helm, values: Object, said: str) -> None:
    assert said in helm.notes(values)
    assert said not in helm.notes()
