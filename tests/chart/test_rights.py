# SPDX-License-Identifier: Apache-2.0
"""The chart grants what the operator's code uses, and nothing more."""

import pytest
from tests.chart import rights as code
from tests.chart.rendering import Helm, Object, identity, of_kind, of_webhook, rights

LEASE = "pools-operator"
KNOWN = set(code.VERBS) | code.ELSEWHERE


def roles(objects: list[Object]) -> dict[tuple[str, str, str], set[tuple[str, str, str, str]]]:
    """Rights of the operator's own roles, by kind, namespace and name."""
    return all_roles([o for o in objects if not of_webhook(o)])


def all_roles(objects: list[Object]) -> dict[tuple[str, str, str], set[tuple[str, str, str, str]]]:
    found = [o for o in objects if o["kind"] in ("ClusterRole", "Role") and ":pool-" not in o["metadata"]["name"]]
    return {identity(o): set(rights(o["rules"])) for o in found}


def everywhere(found: set[tuple[str, str, str]]) -> set[tuple[str, str, str, str]]:
    return {(*right, "") for right in found}


def test_every_call_of_the_operator_is_of_a_known_shape() -> None:
    assert {method for webhook in (False, True) for method, _ in code.calls(webhook=webhook)} <= KNOWN
    assert len(code.used()) > 20  # the code is still found


def test_cluster_mode_grants_what_the_code_uses(helm: Helm) -> None:
    found = roles(helm.template())

    assert found == {
        ("ClusterRole", "", "kvpool:system:pools"): everywhere(code.pool_rights() | code.cluster_rights()),
        ("Role", "system", LEASE): lease_rights(),
    }


def test_namespaced_mode_looks_into_no_other_namespace(helm: Helm) -> None:
    found = roles(helm.template({"watchNamespaces": ["a", "b"]}))

    assert found == {
        ("ClusterRole", "", "kvpool:system:pools"): everywhere(code.cluster_rights()),
        ("Role", "a", "kvpool:system:pools"): everywhere(code.pool_rights()),
        ("Role", "b", "kvpool:system:pools"): everywhere(code.pool_rights()),
        ("Role", "system", LEASE): lease_rights(),
    }


def lease_rights() -> set[tuple[str, str, str, str]]:
    """Only its own Lease; but who creates has no name to be held to yet."""
    return {(*right, "" if right[2] == "create" else LEASE) for right in code.own_rights()}


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}], ids=["cluster", "namespaced"])
def test_no_role_reads_secrets_or_knows_wildcards(helm: Helm, values: Object) -> None:
    for granted in all_roles(helm.template(values)).values():
        for group, resource, verb, name in granted:
            assert "*" not in group + resource + verb
            assert resource != "secrets" or verb == "create" or name == "pools-webhook"


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a", "b"]}], ids=["cluster", "namespaced"])
def test_every_role_is_bound_to_the_operators_account_alone(helm: Helm, values: Object) -> None:
    objects = [o for o in helm.template(values) if not of_webhook(o)]
    bindings = of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding")

    bound = {(b["roleRef"]["kind"], b["metadata"].get("namespace", ""), b["roleRef"]["name"]) for b in bindings}
    assert bound == set(roles(objects))
    account = {"kind": "ServiceAccount", "name": "pools-operator", "namespace": "system"}
    assert all(b["subjects"] == [account] for b in bindings)


def test_pools_belong_to_those_who_may_edit_the_namespace(helm: Helm) -> None:
    found = {o["metadata"]["name"].rpartition(":")[2]: o for o in of_kind(helm.template(), "ClusterRole")}

    verbs = {name: {v for _, _, v, _ in rights(found[name]["rules"])} for name in ("pool-viewer", "pool-editor")}
    assert verbs["pool-viewer"] == {"get", "list", "watch"}
    assert verbs["pool-editor"] == {"create", "update", "patch", "delete", "deletecollection"}
    assert aggregates(found["pool-viewer"]) == {"view", "edit", "admin"}
    assert aggregates(found["pool-editor"]) == {"edit", "admin"}


def aggregates(role: Object) -> set[str]:
    start = "rbac.authorization.k8s.io/aggregate-to-"
    return {k.removeprefix(start) for k, v in role["metadata"]["labels"].items() if k.startswith(start) and v == "true"}


def test_roles_can_be_left_to_others(helm: Helm) -> None:
    objects = helm.template({"rbac": {"create": False, "aggregate": False}})

    assert not [o for o in objects if "Role" in o["kind"]]


HOOKS = "system.pools-webhook"


def webhook_roles(objects: list[Object]) -> dict[tuple[str, str, str], set[tuple[str, str, str, str]]]:
    return all_roles([o for o in objects if of_webhook(o)])


def own_secret(found: set[tuple[str, str, str]]) -> set[tuple[str, str, str, str]]:
    return {(*right, "" if right[2] == "create" else "pools-webhook") for right in found}


def named(found: set[tuple[str, str, str]]) -> set[tuple[str, str, str, str]]:
    return {(*right, HOOKS) for right in found}


def test_the_admission_server_has_what_its_code_uses_and_nothing_more(helm: Helm) -> None:
    pools, hooks, own = code.webhook_rights()

    assert webhook_roles(helm.template()) == {
        ("ClusterRole", "", "kvpool:system:pools:webhook"): everywhere(pools) | named(hooks),
        ("Role", "system", "pools-webhook"): own_secret(own),
    }
    assert webhook_roles(helm.template({"watchNamespaces": ["a"]})) == {
        ("ClusterRole", "", "kvpool:system:pools:webhook"): named(hooks),
        ("Role", "a", "kvpool:system:pools:webhook"): everywhere(pools),
        ("Role", "system", "pools-webhook"): own_secret(own),
    }


def test_where_certificates_are_somebody_elses_the_admission_server_touches_none(helm: Helm) -> None:
    found = webhook_roles(helm.template({"webhook": {"certManager": {"enabled": True}}}))

    assert {verb for granted in found.values() for _, resource, verb, _ in granted if "webhook" in resource} == {"get"}
    assert not [right for granted in found.values() for right in granted if right[1] == "secrets"]


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a", "b"]}], ids=["cluster", "namespaced"])
def test_every_role_of_the_admission_server_is_bound_to_its_account_alone(helm: Helm, values: Object) -> None:
    objects = [o for o in helm.template(values) if of_webhook(o)]
    bindings = of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding")

    bound = {(b["roleRef"]["kind"], b["metadata"].get("namespace", ""), b["roleRef"]["name"]) for b in bindings}
    assert bound == set(webhook_roles(objects))
    account = {"kind": "ServiceAccount", "name": "pools-webhook", "namespace": "system"}
    assert all(b["subjects"] == [account] for b in bindings)
