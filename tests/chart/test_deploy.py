# SPDX-License-Identifier: Apache-2.0
"""The file for plain kubectl is the chart's, without helm's traces."""

import yaml
from tests.chart.rendering import Helm, identity
from tools.chart import CRD_TEMPLATE, DEPLOY, crd_template, rendered


def test_the_crds_template_is_what_the_operators_types_say() -> None:
    assert CRD_TEMPLATE.read_text() == crd_template()


def test_the_file_is_what_the_chart_renders(helm: Helm) -> None:
    assert DEPLOY.read_text() == rendered(helm.binary)


def test_the_file_holds_everything_but_the_test_and_the_namespace_first(helm: Helm) -> None:
    found = [identity(body) for body in yaml.safe_load_all(DEPLOY.read_text()) if body]

    assert found[0] == ("Namespace", "", "kvpool-system")
    expected = {identity(o) for o in helm.template(release="kvpool", namespace="kvpool-system")}
    assert set(found[1:]) == {i for i in expected if i[0] != "Pod"}
    assert {namespace for _, namespace, _ in found} == {"", "kvpool-system"}


def test_nothing_in_the_file_is_for_helm() -> None:
    text = DEPLOY.read_text()

    assert "helm.sh" not in text
    assert "Helm" not in text
