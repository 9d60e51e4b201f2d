# SPDX-License-Identifier: Apache-2.0
"""Every pod of the corpus against its golden patch, and what must hold for each of them."""

import copy
import itertools
import json
from typing import Any

import jsonpatch
import pytest
from tests.unit.operator.wiring.corpus import AXES, POOLS, Case, Pod, excluded, outcome, place, pool_named, read

from kvpool import config
from kvpool_operator.wiring import Note, Skip

CASES = read()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def wired(case: Case) -> Pod:
    found: Pod = jsonpatch.apply_patch(case.pod, list(outcome(case).patch))
    return found


def test_each_pair_of_values_that_can_occur_does() -> None:
    seen = {frozenset(p) for c in CASES for p in itertools.combinations(place(c).items(), 2)}
    wanted = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if not excluded({a: x, b: y})
    }

    assert len(CASES) >= 40
    assert not [sorted(p) for p in wanted - seen]
    assert not [c.name for c in CASES if excluded(place(c))]


@each_case
def test_the_patch_is_the_golden_one(case: Case) -> None:
    assert list(outcome(case).patch) == case.patch


@each_case
def test_wiring_twice_is_wiring_once(case: Case) -> None:
    assert outcome(case, wired(case)).patch == ()


@each_case
def test_what_the_user_wrote_stays(case: Case) -> None:
    """Words, variables, mounts, volumes and containers are as before, in their order, but for a completed connector."""
    before, after = case.pod["spec"], wired(case)["spec"]
    for old, new in zip(before["containers"], after["containers"], strict=True):
        for key in set(old) - {"args", "command", "env", "volumeMounts"}:
            assert new[key] == old[key]
        for key in ("env", "volumeMounts"):
            kept = [v for v in old.get(key, []) if v["name"] != "PYTHONPATH" or "valueFrom" in v]
            assert [v for v in new.get(key, []) if v in kept] == kept
        for key in ("command", "args"):
            assert [w for w in old.get(key, []) if "KVPoolConnector" not in w] == [
                w for w in new.get(key, [])[: len(old.get(key, []))] if "KVPoolConnector" not in w
            ]
    assert after["volumes"][: len(before["volumes"])] == before["volumes"]
    inits = before.get("initContainers", [])
    assert after.get("initContainers", [])[: len(inits)] == inits


@each_case
def test_names_are_unique_and_mounts_have_volumes(case: Case) -> None:
    spec = wired(case)["spec"]
    volumes = [v["name"] for v in spec["volumes"]]
    everything = [*spec["containers"], *spec.get("initContainers", [])]
    for container in everything:
        for key, field in (("env", "name"), ("volumeMounts", "mountPath")):
            values = [v[field] for v in container.get(key, [])]
            assert len(values) == len(set(values))
        assert {m["name"] for m in container.get("volumeMounts", [])} <= set(volumes)
    assert len(volumes) == len(set(volumes))
    assert len(everything) == len({c["name"] for c in everything})


@each_case
def test_a_skipped_pod_gets_an_annotation_alone(case: Case) -> None:
    result = outcome(case)
    if result.skip is None:
        return
    made = wired(case)

    assert made["metadata"]["annotations"]["kvpool.dev/wiring"] == result.skip
    assert "kvpool.dev/wired" not in made["metadata"]["annotations"]
    assert made["spec"] == case.pod["spec"]
    assert len(result.warnings) == 1


def engines(pod: Pod) -> list[Pod]:
    return [c for c in pod["spec"]["containers"] if any(e["name"] == "KVPOOL_CLIENT__SERVER" for e in c.get("env", []))]


def words(container: Pod) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


@each_case
def test_the_connector_reads_what_was_injected(case: Case) -> None:
    if outcome(case).skip:
        return
    found = engines(wired(case))
    assert found
    for container in found:
        literal = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        read_back = config.decode_client(b"", literal)
        pool = pool_named(case.pool)
        near = pool is None or pool.namespace == "models"
        assert bool(read_back.server_key_file) == (near and case.pool != "socket-alone")
        assert bool(read_back.server_key) == (not near)
        assert read_back.server.startswith("ipc://" if case.pool == "socket" else "tcp://")
        assert literal["PYTHONHASHSEED"] == ("42" if place(case)["environment"] == "seed" else "0")


@each_case
def test_the_flag_is_there_or_a_note_says_what_to_do(case: Case) -> None:
    result = outcome(case)
    if result.skip:
        return
    text = json.dumps([words(c) for c in engines(wired(case))])
    expects_hands = {
        Note.SHELL_COMMAND,
        Note.RAY,
        Note.LEADER_WORKER_SET,
        Note.UNKNOWN_COMMAND,
        Note.IMAGE_COMMAND,
        Note.FOREIGN_CONNECTOR,
        Note.UNREADABLE_CONNECTOR,
    }

    by_hand = expects_hands & set(result.notes)
    indirect = place(case)["connector"] == "variable" and case.pod != wired(case)
    assert bool(by_hand) != ("KVPoolConnector" in text or indirect)
    assert [n for n in result.warnings if "by hand" in n or "left alone" in n] or not by_hand


@each_case
def test_baseline_is_kept_unless_the_pool_has_a_socket_and_the_namespace_allows_it(case: Case) -> None:
    spec = wired(case)["spec"]
    added = [v for v in spec["volumes"] if v not in case.pod["spec"]["volumes"]]

    assert any("hostPath" in v for v in added) == (case.pool == "socket" and not outcome(case).skip)
    assert {"hostNetwork", "hostPID"}.isdisjoint(spec)


@each_case
def test_a_payload_is_brought_where_the_pool_says_so(case: Case) -> None:
    result, spec = outcome(case), wired(case)["spec"]
    if result.skip:
        return
    names = [c["name"] for c in spec.get("initContainers", [])]
    paths = [e for c in engines(wired(case)) for e in c["env"] if e["name"] == "PYTHONPATH" and "value" in e]

    assert ("kvpool-payload" in names) == (case.pool in ("copied", "missing"))
    assert any("image" in v for v in spec["volumes"]) == (case.pool == "mounted")
    if case.pool in ("copied", "missing", "mounted"):
        assert all(e["value"].endswith("/opt/kvpool") for e in paths)
        assert bool(paths) == (place(case)["environment"] != "path-elsewhere")
    assert (Note.PAYLOAD_SKEW in result.notes) == (case.pool == "mounted")


def test_every_reason_of_the_axes_occurs() -> None:
    seen: set[Any] = {n for c in CASES for n in (outcome(c).notes or [outcome(c).skip])}

    assert {Skip.NAMESPACE_NOT_ALLOWED, Skip.POOL_NOT_READY, Skip.SOCKET_FORBIDDEN} <= seen
    assert set(Note) - {Note.HOST_NAMES} <= seen
    assert {c.pool for c in CASES} == set(POOLS)


@each_case
def test_the_given_pod_is_not_changed(case: Case) -> None:
    before = copy.deepcopy(case.pod)

    outcome(case)

    assert case.pod == before
