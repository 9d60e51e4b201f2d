# SPDX-License-Identifier: Apache-2.0
"""What follows from single fields, and what no change of a spec may move."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.cases import CASES, facts, pool_of, with_identity

from kvpool_operator.desired import config_map, gpu, manifests, memory, names
from kvpool_operator.desired.provision import known_provision
from kvpool_operator.spec import Pool, parse_pool

GIB = 1 << 30


def pool(name: str = "a", **spec: Any) -> Pool:
    body = {"metadata": {"name": name}, "spec": {"l1": {"size": "64Gi"}, **spec}}
    return parse_pool(with_identity(body))


def daemon_set(pool: Pool, **changes: Any) -> dict[str, Any]:
    (made,) = [m for m in manifests(pool, facts(**changes)) if m["kind"] == "DaemonSet"]
    return made


specs = st.fixed_dictionaries(
    {"l1": st.fixed_dictionaries({"size": st.sampled_from(["64Mi", "1Gi", "512Gi", 2**40])})},
    optional={
        "gpuAccess": st.sampled_from(["Auto", "RuntimeClass", "NRI", "DRA", "Privileged", "None"]).map(
            lambda mode: {"mode": mode}
        ),
        "ipc": st.sampled_from([{"mode": "Isolated"}, {"mode": "HostPathSocket"}]),
        "network": st.integers(1024, 60000).map(lambda p: {"port": p, "operationsPort": p + 1, "bulkPort": p + 2}),
        "podMetadata": st.dictionaries(st.sampled_from(["a", "b/c", "kvpool.dev/pool"]), st.just("x")).map(
            lambda labels: {"labels": labels}
        ),
        "update": st.sampled_from([{"strategy": s} for s in ("Paced", "RollingUpdate", "OnDelete")]),
        "placement": st.sampled_from([{"nodeSelector": {}}, {"tolerations": []}]),
        "clients": st.just({"allowedNamespaces": ["x", "y"]}),
        "image": st.just("other:1"),
    },
)


@given(specs, specs)
def test_selectors_never_move(one: dict[str, Any], other: dict[str, Any]) -> None:
    def selectors(spec: dict[str, Any]) -> list[Any]:
        made = manifests(pool(**spec), facts())
        (apps,) = [m["spec"]["selector"] for m in made if m["kind"] == "DaemonSet"]
        services = {m["metadata"]["name"]: m["spec"]["selector"] for m in made if m["kind"] == "Service"}
        return [apps, services["kvpool-a-servers"]]

    assert selectors(one) == selectors(other)


@given(specs)
def test_pods_always_match_the_selector_and_know_the_whole_pod(spec: dict[str, Any]) -> None:
    made = daemon_set(pool(**spec))
    wanted = made["spec"]["selector"]["matchLabels"]

    assert wanted.items() <= made["spec"]["template"]["metadata"]["labels"].items()
    env = [e["name"] for e in made["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert len(env) == len(set(env))


@given(
    st.lists(
        st.from_regex(r"[a-z0-9]{1,6}(-(node|servers|server|client|[a-z]{1,3})){0,2}", fullmatch=True), unique=True
    )
)
def test_names_of_two_pools_never_clash(pools: list[str]) -> None:
    made = [
        (m["kind"], m["metadata"]["name"])
        for name in pools
        for m in manifests(pool(name, gpuAccess={"mode": "DRA"}), facts())
    ]

    assert len(made) == len(set(made))


def test_the_longest_name_still_fits() -> None:
    longest = pool("a" * 48)

    for made in manifests(longest, facts()):
        assert len(made["metadata"]["name"]) <= 63


@pytest.mark.parametrize(
    ("spec", "existing", "mode"),
    [
        ({}, {"nvidia"}, "RuntimeClass"),
        ({}, set(), "NRI"),
        ({"runtimeClassName": "nvidia-cdi"}, {"nvidia"}, "NRI"),
        ({"runtimeClassName": "nvidia-cdi"}, {"nvidia-cdi"}, "RuntimeClass"),
        ({"mode": "None"}, {"nvidia"}, "None"),
        ({"mode": "Privileged"}, {"nvidia"}, "Privileged"),
    ],
)
def test_auto_takes_the_runtime_class_only_where_it_exists(spec: dict[str, str], existing: set[str], mode: str) -> None:
    assert gpu.mode_in_use(pool(gpuAccess=spec), facts(runtime_classes=frozenset(existing))) == mode


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_only_the_privileged_mode_makes_a_privileged_pod(case: Path) -> None:
    made = daemon_set(pool_of(case))["spec"]["template"]["spec"]

    privileged = [c for c in made["containers"] if c["securityContext"].get("privileged")]
    assert bool(privileged) == (case.name == "privileged")


def test_memory_covers_the_arena_its_volume_and_the_movers() -> None:
    big = pool()

    assert memory.shm_bytes(big) > 64 * GIB
    assert memory.request_bytes(big) >= memory.shm_bytes(big) + 6 * GIB
    assert memory.limit_bytes(big) >= memory.request_bytes(big) * 1.05
    assert memory.request_bytes(pool(gpuAccess={"mode": "None"})) < memory.request_bytes(big)


@pytest.mark.parametrize(("limit", "request_"), [("1", "1"), ("1500m", "1500m"), ("3", "2"), ("0.5", "0.5")])
def test_no_more_processor_time_is_asked_for_than_the_own_limit_allows(limit: str, request_: str) -> None:
    assert memory.resources(pool(resources={"limits": {"cpu": limit}}))["requests"]["cpu"] == request_


def test_own_resources_replace_single_amounts() -> None:
    own = pool(resources={"requests": {"memory": "70Gi"}, "limits": {"cpu": "9"}})

    made = memory.resources(own)

    assert made["requests"] == {"cpu": "2", "memory": str(70 * GIB)}
    assert made["limits"]["cpu"] == "9"
    assert int(made["limits"]["memory"]) > 70 * GIB


def test_a_lower_limit_alone_lowers_the_request_too() -> None:
    made = memory.resources(pool(resources={"limits": {"memory": "65Gi"}}))

    assert made["requests"]["memory"] == made["limits"]["memory"] == str(65 * GIB)


def test_start_up_gets_the_time_that_touching_memory_takes() -> None:
    def budget_s(size: str) -> int:
        probe = daemon_set(pool(l1={"size": size}))["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert budget_s("1Gi") >= 60
    assert budget_s("512Gi") >= 512 * 0.74


def test_other_pools_and_versions_do_not_restart_servers() -> None:
    persistent = pool(l1={"size": "64Gi", "persistence": "Node"})

    alone, joined = (config_map.config_hash(persistent, facts(node_pools=u)) for u in (("1",), ("1", "2")))

    assert alone == joined
    assert config_map.server_config(persistent, facts(node_pools=("1", "2"))).living_pools == ("1", "2")


def test_a_pool_that_keeps_nothing_on_nodes_does_not_sweep_them() -> None:
    assert config_map.server_config(pool(), facts()).living_pools is None


@pytest.mark.parametrize(
    "change",
    [
        {"ipc": {"mode": "HostPathSocket"}},
        {"ipc": {"mode": "HostPathSocket"}, "network": {"auth": "None"}},
        {"network": {"port": 7500}},
        {"network": {"encryption": "All"}},
        {"gpuAccess": {"mode": "None"}},
    ],
)
def test_a_changed_configuration_reaches_the_pods(change: dict[str, Any]) -> None:
    assert config_map.config_hash(pool(**change), facts()) != config_map.config_hash(pool(), facts())


LIVE = [
    {"size": "32Gi"},
    {"size": "4Gi"},
    {"size": "64Gi", "highWatermark": 80},
    {"size": "64Gi", "highWatermark": 80, "lowWatermark": 50},
]


def made_from(wanted: Pool, *before: Pool) -> dict[str, Any]:
    """The DaemonSet after the pool was as *before*, one after the other."""
    provision = None
    for step in (*before, wanted):
        (made,) = [m for m in manifests(step, facts(provision=provision)) if m["kind"] == "DaemonSet"]
        provision = known_provision([made["metadata"]])
    return made


@pytest.mark.parametrize("l1", LIVE)
def test_what_servers_follow_while_they_run_replaces_no_pod(l1: dict[str, Any]) -> None:
    before = pool(l1={"size": "64Gi"})
    changed = pool(l1=l1)

    after = made_from(changed, before)

    assert after["spec"] == made_from(before)["spec"]
    assert config_map.server_config(changed, facts()) != config_map.server_config(before, facts()), (
        "the file tells them"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"logLevel": "Debug"},
        {"clients": {"allowedNamespaces": ["x", "y"]}},
        {"tenants": {"default": "guests", "byNamespace": [{"namespace": "x", "tenant": "y"}]}},
    ],
)
def test_who_may_come_and_how_much_is_logged_replaces_no_pod(change: dict[str, Any]) -> None:
    before, changed = pool(), pool(**change)

    assert made_from(changed, before) == made_from(before) == made_from(changed)
    assert config_map.server_config(changed, facts()) != config_map.server_config(before, facts())


def test_quotas_of_tenants_replace_no_pod() -> None:
    before = pool(l1={"size": "64Gi"})
    changed = pool(l1={"size": "64Gi"}, tenants={"quotas": [{"tenant": "search", "l1Percent": 40}]})

    assert made_from(changed, before) == made_from(before)
    assert config_map.server_config(changed, facts()).l1.quotas == {"search": 0.4}


def test_a_size_that_the_pods_have_no_memory_for_replaces_them() -> None:
    before = made_from(pool(l1={"size": "64Gi"}))
    after = made_from(pool(l1={"size": "65Gi"}), pool(l1={"size": "64Gi"}))

    assert after["spec"]["template"] != before["spec"]["template"]
    (server,) = after["spec"]["template"]["spec"]["containers"]
    assert {"name": "KVPOOL_SERVER__L1__MAX_BYTES", "value": str(65 << 30)} in server["env"]
    assert int(server["resources"]["requests"]["memory"]) > 65 << 30
    assert made_from(pool(l1={"size": "65Gi"})) == after, "as if it had always been so"


def test_growing_back_replaces_no_pod() -> None:
    large, small = pool(l1={"size": "64Gi"}), pool(l1={"size": "8Gi"})

    assert made_from(large, large, small) == made_from(large)


def test_pods_that_are_replaced_anyway_get_the_size_asked_for() -> None:
    large = pool(l1={"size": "64Gi"})
    small = pool(l1={"size": "8Gi"})
    other = pool(l1={"size": "8Gi"}, chunkTokens=512)

    assert made_from(other, large, small) == made_from(other)


def test_a_server_is_not_asked_to_shrink_to_less_than_its_segments_allow() -> None:
    assert made_from(pool(l1={"size": "1Gi"}), pool(l1={"size": "64Gi"})) == made_from(pool(l1={"size": "1Gi"}))


@given(specs, st.lists(st.sampled_from(["1Gi", "2Gi", "16Gi", "30Gi", "64Gi"]), min_size=1, max_size=5))
def test_pods_have_memory_for_the_size_asked_for_whatever_came_before(spec: dict[str, Any], sizes: list[str]) -> None:
    rest = {k: v for k, v in spec.items() if k not in ("l1", "resources")}
    steps = [pool(l1={"size": s}, **rest) for s in sizes]

    made = made_from(steps[-1], *steps[:-1])

    (server,) = made["spec"]["template"]["spec"]["containers"]
    (most,) = (int(e["value"]) for e in server["env"] if e["name"] == "KVPOOL_SERVER__L1__MAX_BYTES")
    size = int(steps[-1].spec.l1.size)
    assert size <= most <= 16 * size
    assert int(server["resources"]["requests"]["memory"]) >= most
    assert config_map.server_config(steps[-1], facts()).l1.size_bytes == size


@pytest.mark.parametrize(
    ("mode", "socket", "expected"),
    [
        ("Ring", False, ("ring",)),
        ("Ring", True, ("ring",)),
        ("Streamed", True, ("streamed",)),
        ("ClientMoved", True, ("client-moved",)),
        ("Auto", True, ("ring", "client-moved", "streamed")),
    ],
)
def test_engines_offer_the_mode_that_the_pool_names(mode: str, socket: bool, expected: tuple[str, ...]) -> None:
    ipc = {"mode": "HostPathSocket" if socket else "Isolated"}

    made = config_map.client_config(pool(transfer={"mode": mode}, ipc=ipc), "")

    assert tuple(str(m) for m in made.modes) == expected


def reachable_ports(pool: Pool) -> tuple[set[int], set[int], set[int]]:
    """TCP ports that movers take, that the node-local Service leads to, and that clients get through to."""
    made = manifests(pool, facts())
    (local,) = [m for m in made if m["metadata"]["name"].endswith("-node")]
    (policy,) = [m for m in made if m["kind"] == "NetworkPolicy"]
    mover = config_map.server_config(pool, facts()).mover
    allowed = {
        n for p in policy["spec"]["ingress"][1]["ports"] for n in range(p["port"], p.get("endPort", p["port"]) + 1)
    }
    taken = set(range(mover.first_port, mover.first_port + mover.ports)) if mover.first_port else set()
    assert all(p["targetPort"] in (p["name"], p["port"]) for p in local["spec"]["ports"])
    return taken, {p["port"] for p in local["spec"]["ports"]}, allowed


def test_engines_of_the_node_reach_the_movers_of_their_server() -> None:
    """A mover's port is reached beside the server's own: by the Service, and through the NetworkPolicy."""
    taken, led_to, allowed = reachable_ports(pool(network={"moverPorts": {"first": 8000, "count": 24}}))

    assert taken == set(range(8000, 8024))
    assert led_to == allowed == taken | {7410, 7412}


ALL = {"network": {"encryption": "All"}}


@pytest.mark.parametrize(
    ("spec", "doors", "ring"),
    [
        ({"gpuAccess": {"mode": "None"}}, {7410, 7412}, True),
        (ALL, {7410}, False),
        ({**ALL, "ipc": {"mode": "HostPathSocket"}}, {7410}, True),
    ],
)
def test_no_port_is_open_that_no_mover_takes(spec: dict[str, Any], doors: set[int], *, ring: bool) -> None:
    """Where all traffic is encrypted, only the socket is left for a ring."""
    taken, led_to, allowed = reachable_ports(pool(**spec))

    assert taken == set()
    assert led_to == allowed == doors
    assert config_map.server_config(pool(**spec), facts()).mover.ring == ring


def test_new_issuer_keys_reach_the_mounted_file_and_replace_no_pod() -> None:
    """Servers read the file again when it changes; a cluster that rotates its keys must not cost every cache."""
    keys = '{"keys":[{}]}'

    assert config_map.server_config_map(pool(), facts(issuer_keys=keys))["data"]["issuer.jwks"] == keys
    assert daemon_set(pool(), issuer_keys=keys) == daemon_set(pool())


def test_another_key_is_another_secret() -> None:
    assert names.key_secret(pool(), "one") != names.key_secret(pool(), "two")


def test_every_term_of_the_users_affinity_keeps_away_from_a_driver_upgrade() -> None:
    term = {"matchExpressions": [{"key": "x", "operator": "Exists"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, term]}}

    made = gpu.affinity(pool(placement={"affinity": {"nodeAffinity": required}}))

    terms = made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [[e["key"] for e in t["matchExpressions"]] for t in terms] == [["x", gpu.DRIVER_STATE_LABEL]] * 2
    assert gpu.affinity(pool(gpuAccess={"mode": "None"})) == {}


def test_monitors_only_where_their_kinds_exist() -> None:
    kinds = {m["kind"] for m in manifests(pool(), facts(monitoring_kinds=frozenset()))}

    assert not kinds & {"PodMonitor", "PrometheusRule"}


def test_alerts_name_only_metrics_of_the_catalogue() -> None:
    catalogue = pytest.importorskip("kvpool.metrics.catalogue", reason="the server's metrics")
    (rule,) = [m for m in manifests(pool(), facts()) if m["kind"] == "PrometheusRule"]
    text = " ".join(r["expr"] for r in rule["spec"]["groups"][0]["rules"])
    known = {m.name for m in catalogue.CATALOGUE}

    used = set(re.findall(r"kvpool_[a-z0-9_]+", text))

    assert used
    assert used <= known


def test_a_pool_is_a_value() -> None:
    one = pool()

    with pytest.raises(AttributeError):
        one.name = "b"  # type: ignore[misc]
    assert msgspec.structs.replace(one, name="b") != one


@given(specs)
def test_services_and_servers_take_both_families_where_the_cluster_has_them(spec: dict[str, Any]) -> None:
    made, known = pool(**spec), facts()
    services = [m for m in manifests(made, known) if m["kind"] == "Service"]
    server = config_map.server_config(made, known)

    assert services
    assert {s["spec"]["ipFamilyPolicy"] for s in services} == {"PreferDualStack"}
    assert server.http.operations_host == "*"
    assert server.listen.tcp_host in ("*", "")
