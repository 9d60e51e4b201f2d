# SPDX-License-Identifier: Apache-2.0
"""From options, file and environment to one configuration, and what is said when a value is wrong."""

from pathlib import Path

import pytest

from kvpool.cli.errors import UsageError
from kvpool.cli.parser import build_parser
from kvpool.cli.settings import client_config, server_config, size


def server(*arguments: str, environ: dict[str, str] | None = None):
    return server_config(build_parser().parse_args(["server", *arguments]), environ or {})


def client(*arguments: str, environ: dict[str, str] | None = None):
    return client_config(build_parser().parse_args(["status", *arguments]), environ or {})


def test_file_then_environment_then_set(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text('{"chunk_tokens": 64, "drain_s": 1, "l1": {"size_bytes": 33554432}}')
    environ = {"KVPOOL_SERVER__DRAIN_S": "2", "KVPOOL_SERVER__L1__SIZE_BYTES": "64MiB"}

    config = server("--config", str(file), "--set", "l1.size_bytes=128MiB", environ=environ)

    assert (config.chunk_tokens, config.drain_s, config.l1.size_bytes) == (64, 2.0, 128 << 20)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("l1.size_bytes", ["path=value"]),
        ("l1.size=8GiB", ["--set l1.size", "no such setting", "configuration.md"]),
        ("l1.size_bytes=lots", ["--set l1.size_bytes", "'lots'", "8GiB"]),
        ("l1.size_bytes=1MiB", ["l1.size_bytes", "16777216", "configuration.md"]),
        ("limits.chunks=100000000", ["limits.chunks", "65536"]),
        ("l1.evict_to=0.99", ["l1.evict_to", "l1.evict_above"]),
        ("listen.socket_path=/" + "x" * 120, ["listen.socket_path", "shorter"]),
        ("auth.kind=secret", ["auth.secret_file"]),
    ],
)
def test_a_wrong_setting_names_field_and_remedy(setting: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        server("--set", setting)

    assert [w for w in words if w not in str(refused.value)] == []
    assert "KVPOOL_SERVER__" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"l1": {"sise_bytes": 1}}', ["sise_bytes", "remove it"]),
        ('{"written_for": "9.9.9", "tiers": []}', ["tiers", "9.9.9"]),
        ('{"drain_s": "x"}', ["drain_s"]),
        ("{", ["JSON"]),
    ],
)
def test_a_wrong_file_is_named_with_field_and_remedy(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "server.json"
    file.write_text(text)

    with pytest.raises(UsageError) as refused:
        server("--config", str(file))

    assert [w for w in [*words, str(file)] if w not in str(refused.value)] == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json.*No such file"):
        server("--config", str(tmp_path / "absent.json"))


def test_a_wrong_variable_keeps_its_name() -> None:
    with pytest.raises(UsageError, match="KVPOOL_SERVER__L1__SIZE_BYTES"):
        server(environ={"KVPOOL_SERVER__L1__SIZE_BYTES": "lots"})


def test_server_option_wins_over_the_environment() -> None:
    environ = {"KVPOOL_CLIENT__SERVER": "ipc:///a", "KVPOOL_CLIENT__REQUEST_S": "3"}

    config = client("--server", "ipc:///b", environ=environ)

    assert (config.server, config.request_s) == ("ipc:///b", 3.0)
    assert client(environ=environ).server == "ipc:///a"


@pytest.mark.parametrize(("address", "words"), [("/run/s", "server"), ("tcp://h:1", "server_key")])
def test_a_wrong_address_is_refused_before_anything_connects(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        client("--server", address)


def test_a_size_names_its_option() -> None:
    assert size("--shard-bytes", "4KiB") == 4096
    with pytest.raises(UsageError, match="--shard-bytes"):
        size("--shard-bytes", "four")
