# SPDX-License-Identifier: Apache-2.0
"""What the chart makes of values: the objects, their names, their security."""

from itertools import combinations
from typing import Any

import pytest
import yaml
from tests.chart.rendering import (
    CRD_NAME,
    Helm,
    Object,
    environment,
    identity,
    of_kind,
    of_webhook,
    only,
    operator,
)
from tools.chart import CHART

from kvpool._version import __version__
from kvpool_operator import crd
from kvpool_operator.desired.daemon_set import USER
from kvpool_operator.settings import Settings

KEEP = {"helm.sh/resource-policy": "keep"}
MONITOR = {"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}}}}
EVERYTHING: Object = {**MONITOR, "watchNamespaces": ["a", "b"]}
PREFIX = "KVPOOL_OPERATOR_"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_to_complain_about(helm: Helm, values: Object) -> None:
    helm.run("lint", "--strict", CHART, "--values", "-", stdin=yaml.safe_dump(values))


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == chart["version"] == __version__


def test_the_defaults_bring_these_objects(helm: Helm) -> None:
    assert sorted(identity(o) for o in helm.template()) == [
        ("ClusterRole", "", "kvpool:system:pools"),
        ("ClusterRole", "", "kvpool:system:pools:pool-editor"),
        ("ClusterRole", "", "kvpool:system:pools:pool-viewer"),
        ("ClusterRole", "", "kvpool:system:pools:webhook"),
        ("ClusterRoleBinding", "", "kvpool:system:pools"),
        ("ClusterRoleBinding", "", "kvpool:system:pools:webhook"),
        ("CustomResourceDefinition", "", CRD_NAME),
        ("Deployment", "system", "pools-operator"),
        ("Deployment", "system", "pools-webhook"),
        ("MutatingWebhookConfiguration", "", "system.pools-webhook"),
        ("Pod", "system", "pools-operator-test"),
        ("PodDisruptionBudget", "system", "pools-operator"),
        ("PodDisruptionBudget", "system", "pools-webhook"),
        ("PriorityClass", "", "system.pools"),
        ("Role", "system", "pools-operator"),
        ("Role", "system", "pools-webhook"),
        ("RoleBinding", "system", "pools-operator"),
        ("RoleBinding", "system", "pools-webhook"),
        ("Service", "system", "pools-operator"),
        ("Service", "system", "pools-webhook"),
        ("ServiceAccount", "system", "pools-operator"),
        ("ServiceAccount", "system", "pools-webhook"),
    ]


@pytest.mark.parametrize(
    ("values", "gone"),
    [
        ({"crds": {"install": False}}, "CustomResourceDefinition"),
        ({"priorityClass": {"create": False}}, "PriorityClass"),
        ({"podDisruptionBudget": {"enabled": False}}, "PodDisruptionBudget"),
        ({"metrics": {"service": False}}, "Service"),
        ({"serviceAccount": {"create": False, "name": "theirs"}}, "ServiceAccount"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_part_can_be_left_out(helm: Helm, values: Object, gone: str) -> None:
    def kinds(values: Object | None = None) -> set[str]:
        return {o["kind"] for o in helm.template(values) if not of_webhook(o)}

    assert kinds(values) == kinds() - {gone}


def test_without_the_admission_server_nothing_of_it_is_there(helm: Helm) -> None:
    everything, without = helm.template(), helm.template({"webhook": {"enabled": False}})

    assert [identity(o) for o in without] == [identity(o) for o in everything if not of_webhook(o)]


def test_the_crd_is_the_operators_and_stays(helm: Helm) -> None:
    made = only(helm.template(), "CustomResourceDefinition")

    assert made["spec"] == crd.crd()["spec"]
    assert made["metadata"]["annotations"] == KEEP
    left = only(helm.template({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "annotations" not in left["metadata"]


def test_the_operator_reads_every_variable_that_the_chart_sets(helm: Helm) -> None:
    for values in ({}, EVERYTHING):
        names = set(environment(helm.template(values)))

        fields = {PREFIX + f.upper() for f in Settings.__dataclass_fields__}
        assert names <= fields


def test_the_operators_settings(helm: Helm) -> None:
    def settings(values: Object) -> Settings:
        return Settings.read({k: v or "from-the-pod" for k, v in environment(helm.template(values)).items()})

    known = settings({})
    assert (known.watch_namespaces, known.priority_class) == ((), "system.pools")
    assert known.server_image == f"kvpool-server:{__version__}"
    assert known.health_port == operator(helm.template())["ports"][0]["containerPort"]
    assert settings(EVERYTHING).watch_namespaces == ("a", "b")
    assert settings({"priorityClass": {"create": False}}).priority_class is None
    assert settings({"priorityClass": {"create": False, "name": "high"}}).priority_class == "high"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, f"kvpool-operator:{__version__}"),
        ({"registry": "registry.example:5000/team"}, f"registry.example:5000/team/kvpool-operator:{__version__}"),
        ({"operator": {"tag": "1.2"}}, "kvpool-operator:1.2"),
        ({"operator": {"repository": "mine/own", "tag": "x"}}, "mine/own:x"),
        ({"operator": {"tag": "1.2", "digest": "sha256:" + "a" * 64}}, "kvpool-operator@sha256:" + "a" * 64),
    ],
)
def test_image_references(helm: Helm, image: Object, expected: str) -> None:
    objects = helm.template({"image": image})

    assert operator(objects)["image"] == expected
    assert only(objects, "Pod")["spec"]["containers"][0]["image"] == expected


def pod_specs(objects: list[Object]) -> list[Object]:
    return [only(objects, "Deployment")["spec"]["template"]["spec"], only(objects, "Pod")["spec"]]


def test_pods_ask_for_nothing_that_the_restricted_level_forbids(helm: Helm) -> None:
    for spec in pod_specs(helm.template()):
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


def test_two_replicas_on_different_nodes_of_which_one_may_go(helm: Helm) -> None:
    objects = helm.template()
    deployment, budget = only(objects, "Deployment")["spec"], only(objects, "PodDisruptionBudget")["spec"]

    selector = deployment["selector"]["matchLabels"]
    assert deployment["replicas"] == 2
    assert budget["selector"]["matchLabels"] == selector
    assert budget["maxUnavailable"] == 1
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    (spread,) = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert spread["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert spread["podAffinityTerm"]["labelSelector"]["matchLabels"] == selector


def test_the_service_leads_to_the_operator_and_not_to_the_test(helm: Helm) -> None:
    objects = helm.template(MONITOR)
    selector = only(objects, "Service")["spec"]["selector"]

    assert selector.items() <= only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert not selector.items() <= only(objects, "Pod")["metadata"]["labels"].items()
    (port,), (open_port,) = only(objects, "Service")["spec"]["ports"], operator(objects)["ports"]
    assert (port["targetPort"], port["port"]) == (open_port["name"], open_port["containerPort"])
    probes = {operator(objects)[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {open_port["name"]}
    assert only(objects, "Service")["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    monitor = only(objects, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= only(objects, "Service")["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "monitoring"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"], "it names the Service's port"
    assert endpoint["path"] == "/metrics"
    (host,) = (e for e in operator(objects)["env"] if e["name"] == f"{PREFIX}HTTP_HOST")
    assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP", "where kubelet and Prometheus knock"


def test_the_priority_class_pushes_nobody_out_and_stays(helm: Helm) -> None:
    made = only(helm.template({"priorityClass": {"value": 123456789}}), "PriorityClass")

    assert made["preemptionPolicy"] == "Never"
    assert made["value"] == 123456789
    assert made["globalDefault"] is False
    assert made["metadata"]["annotations"] == KEEP


@pytest.mark.parametrize(
    ("values", "where", "expected"),
    [
        ({"nodeSelector": {"a": "b"}}, ("nodeSelector",), {"a": "b"}),
        ({"tolerations": [{"key": "x", "operator": "Exists"}]}, ("tolerations",), [{"key": "x", "operator": "Exists"}]),
        ({"priorityClassName": "high"}, ("priorityClassName",), "high"),
        ({"image": {"pullSecrets": [{"name": "s"}]}}, ("imagePullSecrets",), [{"name": "s"}]),
        ({"affinity": {"nodeAffinity": {}}}, ("affinity",), {"nodeAffinity": {}}),
        ({"image": {"pullPolicy": "Never"}}, ("containers", 0, "imagePullPolicy"), "Never"),
        ({"resources": {"limits": {"memory": "1Gi"}}}, ("containers", 0, "resources", "limits", "memory"), "1Gi"),
        ({"serviceAccount": {"name": "own"}}, ("serviceAccountName",), "own"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) and v else "",
)
def test_values_reach_the_operators_pod(helm: Helm, values: Object, where: tuple[Any, ...], expected: object) -> None:
    found: Any = only(helm.template(values), "Deployment")["spec"]["template"]["spec"]
    for step in where:
        found = found[step]

    assert found == expected


def test_labels_of_the_user_cannot_take_the_pods_away_from_their_deployment(helm: Helm) -> None:
    theirs = {"team": "x", "app.kubernetes.io/instance": "theirs"}
    made = only(helm.template({"podLabels": theirs, "podAnnotations": {"note": "y"}}), "Deployment")["spec"]
    pod = made["template"]["metadata"]

    assert pod["labels"]["team"] == "x"
    assert made["selector"]["matchLabels"].items() <= pod["labels"].items()
    assert pod["annotations"] == {"note": "y"}


RELEASES = [
    ("a", "b-c"),
    ("a-b", "c"),
    ("kvpool", "system"),
    ("system", "kvpool"),
    ("kvpool", "other"),
    ("two", "system"),
]


def test_two_releases_never_share_an_object(helm: Helm) -> None:
    values = {"crds": {"install": False}, "watchNamespaces": ["models"], **MONITOR}
    rendered = [
        {identity(o) for o in helm.template(values, release=release, namespace=namespace)}
        for release, namespace in RELEASES
    ]

    for one, other in combinations(rendered, 2):
        assert not one & other


def test_two_releases_do_not_select_each_others_pods(helm: Helm) -> None:
    one = only(helm.template(release="one"), "Deployment")
    two = only(helm.template(release="two"), "Deployment")

    assert not one["spec"]["selector"]["matchLabels"].items() <= two["spec"]["template"]["metadata"]["labels"].items()
    assert environment([one])[f"{PREFIX}LEASE"] != environment([two])[f"{PREFIX}LEASE"]


def test_every_object_says_where_it_comes_from(helm: Helm) -> None:
    for made in helm.template(EVERYTHING):
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kvpool"
        assert labels["app.kubernetes.io/instance"] == "pools"


def test_as_a_part_of_another_chart_it_accepts_globals(helm: Helm) -> None:
    assert of_kind(helm.template({"global": {"anything": 1}}), "Deployment")


def test_names_that_look_like_numbers_stay_text(helm: Helm) -> None:
    values = {"watchNamespaces": ["1"], "priorityClass": {"create": False, "name": "1.5"}, **MONITOR}
    objects = helm.template(values, release="7", namespace="42")

    for made in objects:
        assert all(isinstance(part, str) for part in identity(made))
        assert all(isinstance(value, str) for value in made["metadata"]["labels"].values())
    assert all(isinstance(value, str | None) for value in environment(objects).values())
    assert all(s["namespace"] == "42" for b in of_kind(objects, "RoleBinding") for s in b["subjects"])
