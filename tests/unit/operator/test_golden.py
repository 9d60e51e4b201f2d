# SPDX-License-Identifier: Apache-2.0
"""Manifests against committed YAML, and what must hold for every manifest of every case."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.operator.cases import CASES, everything, facts, pool_of

from kvpool import config
from kvpool_operator.desired import manifests

each_case = pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)


def containers(value: Any) -> Iterator[Any]:
    """All dicts and lists inside *value*, itself included."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] == kind]


@each_case
def test_manifests_match_the_golden_file(case: Path) -> None:
    golden = list(yaml.safe_load_all((case / "manifests.yaml").read_text()))

    assert everything(case) == golden


def test_there_are_cases_for_every_mode() -> None:
    specs = [pool_of(case).spec for case in CASES]

    assert {s.gpu_access.mode for s in specs} == {"Auto", "RuntimeClass", "NRI", "DRA", "Privileged", "None"}
    assert {s.ipc.mode for s in specs} == {"Isolated", "HostPathSocket"}
    assert {s.update.strategy for s in specs} == {"RollingUpdate", "OnDelete", "Paced"}


@each_case
def test_no_part_of_a_manifest_is_shared(case: Path) -> None:
    seen = [id(c) for m in everything(case) for c in containers(m)]

    assert len(seen) == len(set(seen))


@each_case
def test_building_twice_gives_equal_but_separate_manifests(case: Path) -> None:
    pool = pool_of(case)
    first, second = manifests(pool, facts()), manifests(pool, facts())
    first_parts = [c for m in first for c in containers(m)]  # alive, so that no id is used twice

    assert first == second
    assert not {id(c) for c in first_parts} & {id(c) for m in second for c in containers(m)}


@each_case
def test_every_object_is_owned_and_labelled(case: Path) -> None:
    pool = pool_of(case)

    for made in everything(case):
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (pool.uid, True)
        assert made["metadata"]["namespace"] == pool.namespace
        assert made["metadata"]["labels"]["kvpool.dev/pool"] == pool.name
        assert "finalizers" not in made["metadata"]


@each_case
def test_no_two_objects_share_kind_and_name(case: Path) -> None:
    made = [(m["kind"], m["metadata"]["name"]) for m in everything(case)]

    assert len(made) == len(set(made))


@each_case
def test_the_server_accepts_its_rendered_configuration(case: Path) -> None:
    (mounted,) = [m for m in of_kind(everything(case), "ConfigMap") if m["metadata"]["name"].endswith("-server")]
    pool = pool_of(case)

    read = config.decode_server(mounted["data"]["server.json"].encode(), {"KVPOOL_SERVER__SERVER_ID": "node-1"})

    assert read.l1.size_bytes == pool.spec.l1.size
    assert read.chunk_tokens == pool.spec.chunk_tokens
    assert read.pool_uid == pool.uid
    assert read.server_id == "node-1"


@each_case
def test_the_client_accepts_its_rendered_configuration(case: Path) -> None:
    (mounted,) = [m for m in of_kind(everything(case), "ConfigMap") if m["metadata"]["name"].endswith("-client")]

    read = config.decode_client(mounted["data"]["client.json"].encode(), {})

    spec = pool_of(case).spec
    assert (read.store_generated, read.store_min_tokens) == (spec.store.generated_tokens, spec.store.min_tokens)
    assert (read.load_min_tokens, read.load_budget) == (spec.load.min_tokens, spec.load.time_budget / 100)


@each_case
def test_only_the_mounted_secret_holds_the_private_key(case: Path) -> None:
    made = everything(case)
    private = made[0]["stringData"]["secret"]

    assert all(private not in yaml.safe_dump(m) for m in made[1:])


@each_case
def test_every_mount_has_its_volume_and_every_reference_its_object(case: Path) -> None:
    made = everything(case)
    (daemon_set,) = of_kind(made, "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    names = {(m["kind"], m["metadata"]["name"]) for m in made}
    mounted = {m["name"] for c in pod["containers"] + pod.get("initContainers", []) for m in c["volumeMounts"]}

    assert mounted == {v["name"] for v in pod["volumes"]}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names
        if "secret" in volume:
            assert ("Secret", volume["secret"]["secretName"]) in names
    for claim in pod.get("resourceClaims", []):
        assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in names
