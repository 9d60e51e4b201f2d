# SPDX-License-Identifier: Apache-2.0
"""Configuration: read from file and environment, refused with the field and the remedy, rendered without defaults."""

import json
from collections.abc import Callable

import msgspec
import pytest

from kvpool import __version__
from kvpool.config import (
    LIVE_FIELDS,
    AuthConfig,
    AuthKind,
    ClientConfig,
    ConfigError,
    L1Config,
    ListenConfig,
    ServerConfig,
    decode_client,
    decode_server,
    leaf_fields,
    live_digest,
    parse_bytes,
    render,
    restart_fields,
    without_live,
)
from kvpool.model.identity import Mode, Role


def server(**fields: object) -> ServerConfig:
    return decode_server(json.dumps(fields).encode(), {})


def test_nothing_set_is_the_default() -> None:
    assert decode_server(b"", {}) == ServerConfig()
    assert decode_client(b"", {}) == ClientConfig()


@pytest.mark.behaviour("R008")
def test_a_chunk_is_256_tokens_unless_somebody_says_otherwise() -> None:
    assert decode_server(b"", {}).chunk_tokens == 256
    assert server(chunk_tokens=64).chunk_tokens == 64


@pytest.mark.behaviour("R082")
def test_every_wait_has_a_deadline_by_default() -> None:
    client, leases = ClientConfig(), ServerConfig().leases

    assert all(0 < s < 120 for s in (client.connect_s, client.request_s, client.lookup_s, client.transfer_s))
    assert 0 < leases.heartbeat_s < leases.client_silent_s


def test_the_environment_overrides_the_file() -> None:
    config = decode_server(
        b'{"l1": {"size_bytes": 33554432, "directory": "/a"}}',
        {
            "KVPOOL_SERVER__L1__SIZE_BYTES": "8GiB",
            "KVPOOL_SERVER__LISTEN__SOCKET_MODE": "0600",
            "KVPOOL_SERVER__AUTH__NAMESPACES": '["a", "b"]',
            "KVPOOL_SERVER__L1__PERSIST": "false",
            "KVPOOL_SERVER__DRAIN_S": "2.5",
            "UNRELATED": "x",
        },
    )

    assert config.l1 == L1Config(size_bytes=8 << 30, directory="/a", persist=False)
    assert config.listen.socket_mode == 0o600
    assert config.auth.namespaces == ("a", "b")
    assert config.drain_s == 2.5


def test_variables_that_kubernetes_makes_for_a_service_are_not_ours() -> None:
    environ = {"KVPOOL_SERVER_PORT": "tcp://192.0.2.1:7410", "KVPOOL_SERVER_SERVICE_HOST": "192.0.2.1"}

    assert decode_server(b"", environ) == ServerConfig()


@pytest.mark.parametrize(
    ("text", "count"),
    [("17", 17), ("1Ki", 1024), ("1.5GiB", 3 << 29), ("2 MB", 2_000_000), ("8g", 8_000_000_000), ("1tib", 1 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "Gi", "-1", "8Q", "1 2", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no size in bytes"):
        parse_bytes(text)


REFUSED: list[tuple[str, Callable[[], object], list[str]]] = [
    ("out of range", lambda: server(l1={"size_bytes": 1}), ["l1.size_bytes", ">= 16777216"]),
    ("wrong type", lambda: server(chunk_tokens="many"), ["chunk_tokens", "int"]),
    ("unknown field", lambda: server(l1={"sizes": 1}), ["sizes", "l1", __version__, "remove it"]),
    ("field of a later version", lambda: server(new=1, written_for="9.9.9"), ["new", "9.9.9", __version__]),
    ("no JSON", lambda: decode_server(b"{", {}), ["JSON"]),
    ("no object", lambda: decode_server(b"[]", {}), ["object"]),
    (
        "unknown variable",
        lambda: decode_server(b"", {"KVPOOL_SERVER__NO": "1"}),
        ["KVPOOL_SERVER__NO", "no such setting"],
    ),
    ("bad size", lambda: decode_server(b"", {"KVPOOL_SERVER__L1__SIZE_BYTES": "8Q"}), ["L1__SIZE_BYTES", "suffix"]),
    ("bad number", lambda: decode_server(b"", {"KVPOOL_SERVER__DRAIN_S": "x"}), ["KVPOOL_SERVER__DRAIN_S"]),
    ("bad truth", lambda: decode_server(b"", {"KVPOOL_SERVER__L1__PERSIST": "maybe"}), ["neither true nor false"]),
    ("bad list", lambda: decode_server(b"", {"KVPOOL_SERVER__AUTH__NAMESPACES": "a,b"}), ["JSON"]),
    ("nobody can connect", lambda: server(listen={"socket_path": ""}), ["socket_path", "tcp_host"]),
    ("long path", lambda: server(listen={"socket_path": "/" + "x" * 120}), ["listen.socket_path", "shorter"]),
    ("TCP without keys", lambda: server(listen={"tcp_host": "0.0.0.0"}), ["listen.curve_key_file", "kvpool keys"]),
    (
        "TCP without identity",
        lambda: server(listen={"tcp_host": "0.0.0.0", "curve_key_file": "/k"}),
        ["auth.kind", "secret or token"],
    ),
    ("bulk without TCP", lambda: server(listen={"plain_bulk_port": 0}), ["listen.plain_bulk_port", "tcp_host"]),
    (
        "section that is none",
        lambda: decode_server(b'{"l1": 5}', {"KVPOOL_SERVER__L1__PERSIST": "1"}),
        ["l1", "object"],
    ),
    ("secret without file", lambda: server(auth={"kind": "secret"}), ["auth.secret_file"]),
    ("token without issuer", lambda: server(auth={"kind": "token", "audience": "a"}), ["auth.issuers"]),
    ("watermarks crossed", lambda: server(l1={"evict_above": 0.5}), ["l1.evict_to", "l1.evict_above"]),
    ("odd segment", lambda: server(l1={"segment_bytes": 3 << 20}), ["l1.segment_bytes", "2 MiB"]),
    ("segment above arena", lambda: server(l1={"segment_bytes": 2 << 30}), ["l1.segment_bytes", "at most"]),
    ("silence below heartbeats", lambda: server(leases={"client_silent_s": 1}), ["client_silent_s", "heartbeat"]),
    ("client address", lambda: decode_client(b'{"server": "http://x"}', {}), ["server"]),
    ("client key", lambda: decode_client(b'{"server": "tcp://h:1"}', {}), ["server_key", "public"]),
    (
        "two keys",
        lambda: decode_client(b'{"server": "tcp://h:1", "server_key": "a", "server_key_file": "b"}', {}),
        ["server_key_file", "one"],
    ),
    ("two credentials", lambda: decode_client(b'{"secret_file": "a", "token_file": "b"}', {}), ["secret_file", "one"]),
    ("no mode", lambda: decode_client(b'{"modes": []}', {}), ["modes"]),
]


@pytest.mark.behaviour("R134")
@pytest.mark.parametrize(("read", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_wrong_is_refused_with_field_and_remedy(read: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read()

    for word in words:
        assert word in str(refused.value)


def test_only_what_differs_from_the_defaults_is_rendered() -> None:
    config = ServerConfig(
        written_for=__version__,
        pool_uid="uid-1",
        listen=ListenConfig(tcp_host="0.0.0.0", curve_key_file="/keys/curve"),
        auth=AuthConfig(kind=AuthKind.SECRET, secret_file="/s"),
    )

    raw = json.loads(render(config))

    assert raw == {
        "written_for": __version__,
        "pool_uid": "uid-1",
        "listen": {"tcp_host": "0.0.0.0", "curve_key_file": "/keys/curve"},
        "auth": {"kind": "secret", "secret_file": "/s"},
    }
    assert decode_server(render(config), {}) == config


def test_a_client_comes_back_from_its_text() -> None:
    config = ClientConfig(role=Role.CONSUMER, modes=(Mode.STREAMED,), label="pod-1")

    assert decode_client(render(config), {}) == config


def test_every_field_says_what_it_is() -> None:
    def bare(cls: type[msgspec.Struct], path: str) -> list[str]:
        found = []
        for field in msgspec.structs.fields(cls):
            default = field.default
            if isinstance(default, msgspec.Struct):
                found += bare(type(default), f"{path}{field.name}.")
            elif "description" not in json.dumps(msgspec.json.schema(field.type)):
                found.append(path + field.name)
        return found

    assert bare(ServerConfig, "") + bare(ClientConfig, "") == []


def test_an_environment_of_another_version_may_hold_what_this_one_does_not_know() -> None:
    environ = {"KVPOOL_CLIENT__LABEL": "pod", "KVPOOL_CLIENT__FROM_THE_FUTURE": "1"}

    read = decode_client(b"", environ | {"KVPOOL_CLIENT__WRITTEN_FOR": "99.0"})

    assert read.label == "pod"
    with pytest.raises(ConfigError, match="FROM_THE_FUTURE"):
        decode_client(b"", environ)


def test_what_is_followed_while_a_server_runs_is_no_reason_to_restart_it() -> None:
    before = server(l1={"quotas": {"a": 0.5}}, log={"level": "debug"})
    after = server(
        l1={"size_bytes": 64 << 20, "evict_to": 0.5},
        auth={"tenant": "t", "tenants": {"n": "t"}, "namespaces": ["n"]},
        living_pools=["p"],
    )

    assert restart_fields(before, after) == []
    assert without_live(before) == without_live(after) == ServerConfig()


def test_every_other_field_counts_from_the_next_start_on() -> None:
    changed = server(chunk_tokens=64, log={"format": "text", "level": "error"}, auth={"leeway_s": 1})

    assert restart_fields(ServerConfig(), changed) == ["auth.leeway_s", "chunk_tokens", "log.format"]
    assert without_live(changed) != without_live(ServerConfig())
    assert {".".join(path) for path, _ in leaf_fields(ServerConfig).values()} >= LIVE_FIELDS


def test_one_digest_stands_for_what_is_followed_and_for_nothing_else() -> None:
    followed: list[dict[str, object]] = [
        {"auth": {"namespaces": ["n"]}},
        {"auth": {"tenant": "t"}},
        {"auth": {"tenants": {"n": "t"}}},
        {"l1": {"evict_above": 0.98}},
        {"l1": {"evict_to": 0.5}},
        {"l1": {"quotas": {"a": 0.5}}},
        {"log": {"level": "debug"}},
    ]
    told_elsewhere = {"l1": {"size_bytes": 64 << 20}, "living_pools": ["p"], "written_for": "9.9.9"}

    digests = [live_digest(server(**more)) for more in ({}, *followed)]

    assert len(set(digests)) == len(digests)
    assert live_digest(server(**told_elsewhere, chunk_tokens=64)) == digests[0]
    both = ({"a": 0.1, "b": 0.2}, {"b": 0.2, "a": 0.1})
    assert len({live_digest(server(l1={"quotas": quotas})) for quotas in both}) == 1
