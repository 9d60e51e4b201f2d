# SPDX-License-Identifier: Apache-2.0
"""What the chart makes of the admission server: its hooks, its pods, its certificates."""

import re

import pytest
from tests.chart.rendering import Helm, Object, of_kind, only

from kvpool_operator.admission.server import PATHS
from kvpool_operator.admission.settings import WebhookSettings
from kvpool_operator.metrics import ADMISSION, CATALOGUE

PREFIX = "KVPOOL_WEBHOOK_"


def hooks(objects: list[Object]) -> dict[str, Object]:
    return {h["name"]: h for h in only(objects, "MutatingWebhookConfiguration", webhook=True)["webhooks"]}


def expressions(selector: Object) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(e["key"], e["operator"], tuple(e.get("values", ()))) for e in selector["matchExpressions"]]


def selects(selector: Object, labels: Object) -> bool:
    """As the API server judges."""
    for key, operator, values in expressions(selector):
        holds = {
            "Exists": key in labels,
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
        }[operator]
        if not holds:
            return False
    return True


def asked(objects: list[Object], pod: Object, namespace: Object) -> list[Object]:
    return [
        h
        for h in hooks(objects).values()
        if selects(h["objectSelector"], pod) and selects(h["namespaceSelector"], namespace)
    ]


OPTED_IN = {"kvpool.dev/pool": "main"}
REQUIRED = {**OPTED_IN, "kvpool.dev/wiring": "required"}


@pytest.mark.parametrize("level", ["", "privileged", "baseline", "restricted"])
@pytest.mark.parametrize("pod", [OPTED_IN, REQUIRED], ids=["opted-in", "required"])
def test_each_pod_has_exactly_one_hook_that_knows_its_namespaces_level(helm: Helm, pod: Object, level: str) -> None:
    namespace = {
        "kubernetes.io/metadata.name": "models",
        **({"pod-security.kubernetes.io/enforce": level} if level else {}),
    }

    (hook,) = asked(helm.template(), pod, namespace)

    assert hook["failurePolicy"] == ("Fail" if pod is REQUIRED else "Ignore")
    assert PATHS[hook["clientConfig"]["service"]["path"]] == (level not in ("baseline", "restricted"))


def test_nobody_else_is_asked_about(helm: Helm) -> None:
    objects = helm.template({"webhook": {"excludedNamespaces": ["away"]}})

    for pod in (OPTED_IN, REQUIRED):
        for name in ("kube-system", "kube-public", "kube-node-lease", "system", "away"):
            assert not asked(objects, pod, {"kubernetes.io/metadata.name": name})
    models = {"kubernetes.io/metadata.name": "models"}
    assert not asked(objects, {}, models)
    assert not asked(objects, {**OPTED_IN, "kvpool.dev/role": "server"}, models)


def test_named_namespaces_are_the_only_ones(helm: Helm) -> None:
    objects = helm.template({"watchNamespaces": ["a"]})

    assert asked(objects, OPTED_IN, {"kubernetes.io/metadata.name": "a"})
    assert not asked(objects, OPTED_IN, {"kubernetes.io/metadata.name": "b"})


def test_hooks_are_short_repeatable_and_without_side_effects(helm: Helm) -> None:
    for hook in hooks(helm.template({"webhook": {"timeoutSeconds": 3}})).values():
        assert hook["timeoutSeconds"] == 3
        assert hook["reinvocationPolicy"] == "IfNeeded"
        assert hook["sideEffects"] == "None"
        assert "caBundle" not in hook["clientConfig"], "whoever keeps the certificate owns that field"
        (rule,) = hook["rules"]
        assert (rule["resources"], rule["operations"], rule["scope"]) == (["pods"], ["CREATE"], "Namespaced")
        assert {c["name"] for c in hook["matchConditions"]} == {"no-mirror-of-a-static-pod", "not-windows"}


def container(objects: list[Object]) -> Object:
    (found,) = only(objects, "Deployment", webhook=True)["spec"]["template"]["spec"]["containers"]
    return found


def settings(objects: list[Object]) -> WebhookSettings:
    environ = {e["name"]: e.get("value") or "from-the-pod" for e in container(objects)["env"]}
    assert set(environ) <= {PREFIX + f.upper() for f in WebhookSettings.__dataclass_fields__}
    return WebhookSettings.read(environ)


def test_the_process_is_told_what_the_chart_made(helm: Helm) -> None:
    objects = helm.template({"watchNamespaces": ["a", "b"]})
    found, service = settings(objects), only(objects, "Service", webhook=True)

    assert found.configuration == only(objects, "MutatingWebhookConfiguration", webhook=True)["metadata"]["name"]
    assert found.names == (f"{service['metadata']['name']}.system.svc",)
    assert found.watch_namespaces == ("a", "b")
    assert found.payload_image.startswith("kvpool-payload:")
    ports = {p["name"]: p["containerPort"] for p in container(objects)["ports"]}
    assert ports == {"reviews": found.port, "http": found.health_port}
    assert {p["name"]: p["targetPort"] for p in service["spec"]["ports"]} == {"reviews": "reviews", "http": "http"}
    for hook in hooks(objects).values():
        assert hook["clientConfig"]["service"]["name"] == service["metadata"]["name"]


def test_its_pods_are_restricted_and_replaced_one_by_one(helm: Helm) -> None:
    objects = helm.template()
    spec = only(objects, "Deployment", webhook=True)["spec"]
    pod = spec["template"]["spec"]

    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert pod["terminationGracePeriodSeconds"] > settings(objects).linger_s + 5
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container(objects)["securityContext"]["readOnlyRootFilesystem"] is True
    budget = only(objects, "PodDisruptionBudget", webhook=True)["spec"]
    assert budget["selector"] == spec["selector"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    operator = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert not spec["selector"]["matchLabels"].items() <= operator.items()
    (scratch,) = container(objects)["volumeMounts"]
    assert scratch["mountPath"] == settings(objects).scratch_folder


def test_cert_manager_makes_the_certificate_and_publishes_the_bundle(helm: Helm) -> None:
    objects = helm.template({"webhook": {"certManager": {"enabled": True}}})
    certificates, issuers = named(objects, "Certificate"), named(objects, "Issuer")
    made = certificates["pools-webhook"]

    configuration = only(objects, "MutatingWebhookConfiguration", webhook=True)
    assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "system/pools-webhook"
    assert made["spec"]["dnsNames"] == list(settings(objects).names)
    assert made["spec"]["issuerRef"]["name"] in issuers
    folder = settings(objects).certificate_folder
    assert folder in {m["mountPath"] for m in container(objects)["volumeMounts"]}
    volumes = only(objects, "Deployment", webhook=True)["spec"]["template"]["spec"]["volumes"]
    assert {"secretName": made["spec"]["secretName"], "defaultMode": 0o440} in [v.get("secret") for v in volumes]


def test_a_renewed_certificate_has_the_same_authority(helm: Helm) -> None:
    """Pods serve the former one until the kubelet brings the new one: what is published must verify both."""
    objects = helm.template({"webhook": {"certManager": {"enabled": True}}})
    certificates, issuers = named(objects, "Certificate"), named(objects, "Issuer")

    authority = certificates["pools-webhook-ca"]["spec"]
    signing = issuers[certificates["pools-webhook"]["spec"]["issuerRef"]["name"]]["spec"]
    assert signing == {"ca": {"secretName": authority["secretName"]}}
    assert authority["isCA"]
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    assert issuers[authority["issuerRef"]["name"]]["spec"] == {"selfSigned": {}}


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in of_kind(objects, kind)}


def test_an_issuer_of_the_users_is_taken_instead(helm: Helm) -> None:
    theirs = {"kind": "ClusterIssuer", "name": "own"}
    objects = helm.template({"webhook": {"certManager": {"enabled": True, "issuerRef": theirs}}})

    assert only(objects, "Certificate", webhook=True)["spec"]["issuerRef"] == theirs
    assert not of_kind(objects, "Issuer")


def test_prometheus_finds_it(helm: Helm) -> None:
    objects = helm.template({"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}}}})
    monitor = only(objects, "ServiceMonitor", webhook=True)
    service = only(objects, "Service", webhook=True)

    assert monitor["metadata"]["labels"]["release"] == "monitoring"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {p["name"] for p in service["spec"]["ports"]}


def test_alerts_name_series_that_exist(helm: Helm) -> None:
    enabled = {"metrics": {"prometheusRule": {"enabled": True, "labels": {"release": "monitoring"}}}}
    made = only(helm.template(enabled), "PrometheusRule")

    (group,) = made["spec"]["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    assert {"KvpoolPodsUnwired", "KvpoolWebhookAway", "KvpoolWebhookCertificateEnds"} <= set(alerts)
    known = {metric.name for metric in (*CATALOGUE, *ADMISSION)}
    for rule in alerts.values():
        used = re.findall(r"kvpool_\w+", rule["expr"])
        assert used
        assert set(used) <= known
        assert 'namespace="system"' in rule["expr"]
    assert made["metadata"]["labels"]["release"] == "monitoring"
    without = only(helm.template({**enabled, "webhook": {"enabled": False}}), "PrometheusRule")
    assert not any("Webhook" in rule["alert"] for rule in without["spec"]["groups"][0]["rules"])
