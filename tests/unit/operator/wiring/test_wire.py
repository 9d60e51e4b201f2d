# SPDX-License-Identifier: Apache-2.0
"""Wiring case by case: which container, which words, what the user's own things do to it."""

import json
from typing import Any

import jsonpatch
import pytest
from tests.unit.operator.cases import PUBLIC_KEY
from tests.unit.operator.wiring.corpus import situation

from kvpool_operator.spec import parse_pool
from kvpool_operator.wiring import (
    BY_HAND,
    FLAG,
    REMEDIES,
    Note,
    Outcome,
    Situation,
    Skip,
    difference,
    wanted_pool,
    wire,
    wiring_mark,
)
from kvpool_operator.wiring.command import Program, invocation

Pod = dict[str, Any]


def pod(*containers: Pod, labels: Pod | None = None, annotations: Pod | None = None, **spec: Any) -> Pod:
    metadata = {"name": "p", "labels": {"kvpool.dev/pool": "main", **(labels or {})}, "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def container(name: str = "vllm", image: str = "vllm/vllm-openai:v0.32.0", **fields: Any) -> Pod:
    return {"name": name, "image": image, **fields}


SERVE = container(args=["--model", "m"])


def after(body: Pod, result: Outcome) -> Pod:
    made: Pod = jsonpatch.apply_patch(body, list(result.patch))
    return made


def words(body: Pod, where: str = "near", index: int = 0) -> list[str]:
    made = after(body, wire(body, situation(where)))["spec"]["containers"][index]
    return [*made.get("command", []), *made.get("args", [])]


PROGRAMS = [
    (container(), Program.IMAGE),
    (container(args=["--model", "m"]), Program.ENGINE),
    (container(args=["Qwen/Qwen3-8B", "--port=1"]), Program.ENGINE),
    (container(args=["serve", "m"]), Program.ENGINE),
    (container(image="registry.example/team/vllm-cpu@sha256:0", args=["m"]), Program.ENGINE),
    (container(image="registry.example/vllm-router:1", args=["m"]), Program.OTHER),
    (container(image="own/serve", args=["m"]), Program.OTHER),
    (container(image="own/serve", args=["--served_model_name=x"]), Program.ENGINE),
    (container(image="own/serve", args=["--port", "1"]), Program.OTHER),
    (container(image="own", args=["vllm", "serve", "m"]), Program.ENGINE),
    (container(image="own", args=["bash", "-c", "vllm serve m"]), Program.SHELL),
    (container(command=["vllm", "serve"]), Program.ENGINE),
    (container(command=["vllm", "bench", "serve"]), Program.OTHER),
    (container(command=["vllm"]), Program.OTHER),
    (container(command=["/usr/bin/python3.12", "-u", "-m", "vllm.entrypoints.openai.api_server"]), Program.ENGINE),
    (container(command=["python", "-m", "vllm.entrypoints.api_server"]), Program.ENGINE),
    (container(command=["python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"]), Program.ENGINE),
    (container(command=["python3", "-m", "vllm.entrypoints.cli.main", "bench"]), Program.OTHER),
    (container(command=["python3", "-m", "vllm.entrypoints.openai.run_batch"]), Program.OTHER),
    (container(command=["python3", "serve.py"]), Program.OTHER),
    (container(command=["python3", "-c", "import vllm"]), Program.OTHER),
    (container(command=["tini", "--", "vllm", "serve"]), Program.ENGINE),
    (container(command=["dumb-init", "env", "A=1", "vllm", "serve"]), Program.ENGINE),
    (container(command=["env", "-i", "vllm", "serve"]), Program.OTHER),
    (container(command=["tini"]), Program.OTHER),
    (container(command=["/bin/sh", "/start.sh"]), Program.SHELL),
    (container(command=["ray", "start", "--block"]), Program.RAY),
]


@pytest.mark.parametrize(("given", "expected"), PROGRAMS, ids=lambda v: json.dumps(v) if isinstance(v, dict) else "")
def test_what_a_container_runs(given: Pod, expected: Program) -> None:
    assert invocation(given).program is expected


def test_engines_are_told_from_their_companions() -> None:
    beside = container("proxy", "registry.example/proxy:1", args=["--port", "1"])
    by_words = pod(beside, container("a", "own/image", command=["vllm", "serve", "m"]))
    by_line = pod(beside, container("a", "own/image", command=["sh", "-c", "cd /x && exec vllm serve m"]))
    by_image = pod(beside, container("a", command=["/start"]))
    alone = pod(container("a", "own/image", command=["/start"]))
    unclear = pod(beside, container("a", "own/image", command=["/start"]))

    for body, index in ((by_words, 1), (by_line, 1), (by_image, 1), (alone, 0)):
        made = after(body, wire(body, situation("near")))["spec"]["containers"]
        assert [i for i, c in enumerate(made) if "env" in c] == [index]
    assert wire(unclear, situation("near")).skip is Skip.CONTAINER_UNCLEAR


def test_the_annotation_names_the_engine() -> None:
    both = [container("a", "own", command=["/a"]), container("b", "own", command=["/b"])]
    named = pod(*both, annotations={"kvpool.dev/container": "b"})
    nobody = pod(*both, annotations={"kvpool.dev/container": "c"})

    made = after(named, wire(named, situation("near")))["spec"]["containers"]
    assert [("env" in c) for c in made] == [False, True]
    assert wire(nobody, situation("near")).skip is Skip.CONTAINER_NOT_FOUND


def test_the_flag_names_the_connector_and_the_pools_policy() -> None:
    option, value = words(pod(SERVE))[-2:]

    assert option == "--kv-transfer-config"
    assert json.loads(value) == {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.connector.facade",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert json.loads(words(pod(SERVE), "payload-declined")[-1])["kv_load_failure_policy"] == "fail"


def test_our_own_configuration_is_completed_and_what_it_says_wins() -> None:
    own = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"server": "ipc:///x"},
    }
    body = pod(container(args=["m", "--kv-transfer-config", json.dumps(own), "--port", "1"]))

    made = after(body, wire(body, situation("near")))["spec"]["containers"][0]

    complete = json.loads(made["args"][2])
    assert complete == {
        **own,
        "kv_connector_module_path": "kvpool.connector.facade",
        "kv_load_failure_policy": "recompute",
    }
    assert made["args"][3:] == ["--port", "1"]
    assert "KVPOOL_CLIENT__SERVER" not in [e["name"] for e in made["env"]], "the environment would win over it"


@pytest.mark.parametrize(
    ("value", "note"),
    [
        ("{", Note.UNREADABLE_CONNECTOR),
        ("[]", Note.UNREADABLE_CONNECTOR),
        ("$(NOWHERE)", Note.UNREADABLE_CONNECTOR),
        ('{"kv_connector": "NixlConnector"}', Note.FOREIGN_CONNECTOR),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 3}}', Note.FOREIGN_CONNECTOR),
    ],
)
def test_another_connector_is_left_alone(value: str, note: Note) -> None:
    given = ["m", "--kv-transfer-config", value]
    body = pod(container(args=given))

    result = wire(body, situation("near"))

    assert result.notes == (note,)
    assert after(body, result)["spec"]["containers"][0]["args"] == given


@pytest.mark.parametrize("line", ["exec vllm serve m --kv-transfer-config $KV", "vllm serve m --kv_transfer_config=x"])
def test_a_shell_line_with_another_connector_is_told_apart(line: str) -> None:
    assert wire(pod(container(command=["sh", "-c", line])), situation("near")).notes == (Note.FOREIGN_CONNECTOR,)


def test_what_the_user_sets_is_not_set_again() -> None:
    given = [{"name": "KVPOOL_CLIENT__SERVER", "value": "tcp://mine:1"}, {"name": "PYTHONHASHSEED", "value": "7"}]
    body = pod({**SERVE, "env": given})

    env = after(body, wire(body, situation("near")))["spec"]["containers"][0]["env"]

    assert env[:2] == given
    assert len({e["name"] for e in env}) == len(env)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "1024Mi"),
        ({"nvidia.com/gpu": "8"}, "9216Mi"),
        ({"nvidia.com/gpu": "64"}, "16384Mi"),
        ({"nvidia.com/gpu": "8", "memory": "8Gi"}, "4096Mi"),
        ({"memory": "64M"}, "64Mi"),
        ({"memory": "strange", "nvidia.com/gpu": "x"}, "1024Mi"),
    ],
)
def test_shared_memory_fits_the_gpus_and_the_limit(limits: Pod, expected: str) -> None:
    body = pod({**SERVE, "resources": {"limits": limits}})

    made = after(body, wire(body, situation("near")))["spec"]["volumes"]

    assert made[-1] == {"name": "kvpool-shm", "emptyDir": {"medium": "Memory", "sizeLimit": expected}}


@pytest.mark.parametrize("where", ["/dev/shm", "/dev/shm/", "/dev"])
def test_shared_memory_of_the_users_stays(where: str) -> None:
    mount = {"name": "mine", "mountPath": where}
    body = pod({**SERVE, "volumeMounts": [mount]}, volumes=[{"name": "mine", "emptyDir": {}}])

    made = after(body, wire(body, situation("near")))["spec"]

    assert "kvpool-shm" not in [v["name"] for v in made["volumes"]]


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": [{"name": "kvpool-credentials", "emptyDir": {}}]},
        {
            "mounts": [{"name": "x", "mountPath": "/var/run/secrets/kvpool.dev/"}],
            "volumes": [{"name": "x", "emptyDir": {}}],
        },
    ],
)
def test_a_name_or_a_place_that_is_taken_is_not_fought_over(spec: Pod) -> None:
    body = pod({**SERVE, "volumeMounts": spec.get("mounts", [])}, volumes=spec["volumes"])

    result = wire(body, situation("near"))

    assert result.skip is Skip.NAME_TAKEN
    assert after(body, result)["spec"] == body["spec"]


def test_what_the_api_server_fills_in_is_not_another_volume() -> None:
    """Between two calls of the webhook other webhooks run, and the API server fills in defaults."""
    body = pod(SERVE)
    made = after(body, wire(body, situation("copied")))
    for volume in made["spec"]["volumes"]:
        if "projected" in volume:
            volume["projected"]["defaultMode"] = 420
    for c in [*made["spec"]["containers"], *made["spec"]["initContainers"]]:
        c["terminationMessagePath"] = "/dev/termination-log"
        c.setdefault("volumeMounts", []).append({"name": "kube-api-access-x", "mountPath": "/var/run/secrets/k"})

    assert wire(made, situation("copied")).patch == ()


def test_a_label_without_a_name_asks_for_nothing() -> None:
    assert wire(pod(SERVE, labels={"kvpool.dev/pool": ""}), situation("missing")).skip is Skip.NO_POOL_NAMED


def test_a_pod_that_was_wired_and_is_not_any_more_loses_the_mark() -> None:
    body = pod(SERVE, annotations={"kvpool.dev/wired": "0123", "kvpool.dev/pool-namespace": "caches"})

    made = after(body, wire(body, situation("far-stranger")))["metadata"]["annotations"]

    assert made == {"kvpool.dev/pool-namespace": "caches", "kvpool.dev/wiring": "NamespaceNotAllowed"}


@pytest.mark.parametrize("body", [{}, {"metadata": {}}, {"metadata": None, "spec": 3}, pod(*[{"image": "x"}] * 2)])
def test_what_cannot_be_read_is_left_to_the_api_server(body: Pod) -> None:
    assert wire(body, situation("near")).skip in (Skip.MALFORMED, Skip.NO_POOL_NAMED, Skip.CONTAINER_UNCLEAR)


def test_the_pool_is_the_labels_in_the_pods_namespace_or_the_annotations() -> None:
    assert wanted_pool(pod(SERVE), "models") == ("models", "main")
    assert wanted_pool(pod(SERVE, annotations={"kvpool.dev/pool-namespace": "caches"}), "models") == ("caches", "main")


def test_a_pool_of_another_namespace_is_reached_there_with_its_key() -> None:
    body = pod(SERVE, annotations={"kvpool.dev/pool-namespace": "caches"})

    made = after(body, wire(body, situation("far")))["spec"]

    env = {e["name"]: e.get("value") for e in made["containers"][0]["env"]}
    assert env["KVPOOL_CLIENT__SERVER"] == "tcp://kvpool-main-node.caches.svc:7410"
    assert env["KVPOOL_CLIENT__SERVER_KEY"] == PUBLIC_KEY
    (source,) = made["volumes"][0]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "kvpool.dev/caches/main"


def test_the_mark_moves_with_what_engines_reach_and_with_nothing_else() -> None:
    def mark(namespace: str = "models", key: str = PUBLIC_KEY, **spec: Any) -> str:
        metadata = {"name": "main", "namespace": "models", "uid": "1"}
        pool = parse_pool({"metadata": metadata, "spec": {"l1": {"size": "1Gi"}, **spec}})
        return wiring_mark(pool, key, namespace)

    assert mark() == "ef51165510e6", "the mark of pods that run since an older version of the operator"
    assert mark(network={"port": 7500}) != mark()
    assert mark(ipc={"mode": "HostPathSocket"}) != mark()
    assert mark("other") != mark()
    assert mark("other", key="k") != mark("other")
    assert mark(key="k") == mark()
    assert mark(store={"generatedTokens": True}, chunkTokens=512, image="x") == mark()


def test_every_reason_has_a_remedy() -> None:
    assert set(REMEDIES) == {*Skip, *Note}
    assert all(len(text) > 40 for text in REMEDIES.values())


@pytest.mark.parametrize("note", list(Note))
def test_a_warning_is_short_enough_to_be_shown_whole(note: Note) -> None:
    """The API server cuts them at 256 characters."""
    warnings = Outcome((), None, (note,)).warnings

    assert all(len(w) <= 256 for w in warnings)
    assert any(FLAG in w for w in warnings) == (note in BY_HAND)


@pytest.mark.parametrize(
    ("before", "after_it"),
    [
        ({"a/b": 1, "c~": 2}, {"a/b": 2, "d": [1]}),
        ({"a": [1, 2, 3]}, {"a": [1, 3]}),
        ({"a": [{"x": 1}]}, {"a": [{"x": 2}, {"y": 3}]}),
        ({"a": []}, {"a": [1]}),
        ({"a": {"b": 1}}, {"a": [1]}),
    ],
)
def test_a_difference_makes_the_one_of_the_other(before: Pod, after_it: Pod) -> None:
    made = jsonpatch.apply_patch(before, difference(before, after_it))

    assert json.dumps(made, sort_keys=True) == json.dumps(after_it, sort_keys=True)


@pytest.mark.parametrize(
    ("spec", "where", "noted"),
    [
        ({}, "near", False),
        ({"hostNetwork": True}, "near", True),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, "near", True),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, "near", False),
        ({"hostNetwork": True, "dnsPolicy": "None"}, "near", False),
        ({"hostNetwork": True}, "socket", False),
    ],
)
def test_a_pod_that_cannot_resolve_services_is_told(spec: Pod, where: str, noted: bool) -> None:
    assert (Note.HOST_NAMES in wire(pod(SERVE, **spec), situation(where)).notes) is noted


def test_no_secret_of_a_pod_is_in_a_warning() -> None:
    body = pod(container(command=["sh", "-c", "vllm serve m --api-key hunter2"]))

    assert not any("hunter2" in w for w in wire(body, situation("near")).warnings)


def test_a_pool_unknown_in_its_own_namespace_is_wired_by_its_name() -> None:
    known = Situation(namespace="models", pool=None, payload_image="kvpool-payload:0.1.0")
    body = pod(SERVE)

    result = wire(body, known)

    assert result.notes == (Note.POOL_NOT_FOUND,)
    env = {e["name"]: e.get("value") for e in after(body, result)["spec"]["containers"][0]["env"]}
    assert env["KVPOOL_CLIENT__SERVER"] == "tcp://kvpool-main-node.models.svc:7410"


def test_a_pod_that_comes_before_its_pool_gets_the_connector_that_the_pool_may_bring() -> None:
    """Else an engine whose image has none would not even start, and never connect."""
    known = Situation(namespace="models", pool=None, payload_image="kvpool-payload:0.1.0")

    def copiers(body: Pod) -> list[str]:
        return [c["image"] for c in after(body, wire(body, known))["spec"].get("initContainers", [])]

    assert copiers(pod(SERVE)) == ["kvpool-payload:0.1.0"]
    assert copiers(pod(SERVE, annotations={"kvpool.dev/payload": "none"})) == []


@pytest.mark.parametrize(
    ("image", "where", "noted"),
    [
        ("vllm/vllm-openai:v0.32.0", "near", True),
        ("docker.io/vllm/vllm-openai@sha256:0", "near", True),
        ("mirror.example/vllm/vllm-openai", "near", True),
        ("registry.example/team/vllm-openai:v0.32.0", "near", False),
        ("registry.example/vllm/vllm-openai-kvpool:1", "near", False),
        ("vllm/vllm-openai:v0.32.0", "copied", False),
    ],
)
def test_a_published_image_that_gets_no_connector_is_told(image: str, where: str, noted: bool) -> None:
    def notes(**annotations: str) -> tuple[Note, ...]:
        named = {f"kvpool.dev/{key}": value for key, value in annotations.items()}
        return wire(pod(container(image=image, args=["--model", "m"]), annotations=named), situation(where)).notes

    assert (Note.CONNECTOR_MISSING in notes()) is noted
    assert Note.CONNECTOR_MISSING not in notes(payload="none")
