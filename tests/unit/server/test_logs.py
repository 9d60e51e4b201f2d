# SPDX-License-Identifier: Apache-2.0
import io
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import structlog

from kvpool.config import LogConfig
from kvpool.model.identity import ClientKind
from kvpool.server.logs import MASK, configure, set_level
from kvpool.wire.messages import Hello

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwb2QifQ.c2lnbmF0dXJlLWJ5dGVz"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()
    structlog.reset_defaults()


def one_line(stream: io.StringIO, **fields: Any) -> dict[str, Any]:
    configure(LogConfig(), stream)
    structlog.get_logger().info("thing.happened", **fields)
    line: dict[str, Any] = json.loads(stream.getvalue())
    return line


def test_a_line_is_one_json_object_with_time_level_and_event(stream: io.StringIO) -> None:
    line = one_line(stream, chunks=3)

    assert line["event"] == "thing.happened"
    assert line["level"] == "info"
    assert line["chunks"] == 3
    assert line["timestamp"].endswith("Z")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "name", ["credential", "token", "client_token", "secret", "password", "Authorization", "ticket", "secret_key"]
)
def test_fields_named_like_credentials_are_masked(stream: io.StringIO, name: str) -> None:
    assert one_line(stream, **{name: "hunter2"})[name] == MASK
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize("name", ["hit_tokens", "lookup_tokens", "key_version", "secret_file", "tokens"])
def test_numbers_and_paths_are_not(stream: io.StringIO, name: str) -> None:
    value = "/etc/kvpool/file" if name.endswith("file") else 256

    assert one_line(stream, **{name: value})[name] == value


@pytest.mark.behaviour("D113")
@pytest.mark.parametrize(
    "value",
    [
        f"the client sent {TOKEN}",
        {"headers": {"authorization": TOKEN}},
        [{"inner": TOKEN}],
        ValueError(f"bad token {TOKEN}"),
        Hello(
            version_min=1,
            version_max=1,
            kind=ClientKind.PROBE,
            client_id=bytes(16),
            self_test=bytes(32),
            credential=TOKEN,
        ),
    ],
    ids=["text", "mapping", "list", "exception", "message"],
)
def test_a_token_is_masked_wherever_it_stands(stream: io.StringIO, value: object) -> None:
    one_line(stream, detail=value)

    assert TOKEN not in stream.getvalue()
    assert MASK in stream.getvalue()


@pytest.mark.behaviour("D113")
def test_what_a_header_of_authorization_bears_is_masked_whatever_it_looks_like(stream: io.StringIO) -> None:
    one_line(stream, detail="the peer sent Authorization: Bearer hunter2")

    assert "hunter2" not in stream.getvalue()
    assert "the peer sent" in stream.getvalue()


def test_a_token_in_a_traceback_is_masked(stream: io.StringIO) -> None:
    configure(LogConfig(), stream)
    try:
        int(f"cannot read {TOKEN}")
    except ValueError:
        structlog.get_logger().exception("thing.crashed")

    assert "ValueError: invalid literal" in stream.getvalue()
    assert TOKEN not in stream.getvalue()


def test_less_than_the_level_is_not_written(stream: io.StringIO) -> None:
    configure(LogConfig(level="warning"), stream)

    structlog.get_logger().info("thing.happened")
    structlog.get_logger().warning("thing.failed")

    assert "thing.happened" not in stream.getvalue()
    assert "thing.failed" in stream.getvalue()


def test_the_level_can_change_while_all_else_stays(stream: io.StringIO) -> None:
    configure(LogConfig(), stream)
    log = structlog.get_logger()
    levels: tuple[Literal["debug", "error", "info"], ...] = ("debug", "error", "info")
    for level in levels:
        set_level(LogConfig(level=level))
        log.debug("thing.noted", under=level)
        log.info("thing.happened", under=level, token=TOKEN)

    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["under"]) for line in written] == [
        ("thing.noted", "debug"),
        ("thing.happened", "debug"),
        ("thing.happened", "info"),
    ]
    assert TOKEN not in stream.getvalue()


def test_text_is_for_people(stream: io.StringIO) -> None:
    configure(LogConfig(format="text"), stream)

    structlog.get_logger().info("thing.happened", token="hunter2", chunks=2)

    assert "thing.happened" in stream.getvalue()
    assert "chunks=2" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_bytes_become_hex(stream: io.StringIO) -> None:
    assert one_line(stream, boot_id=b"\x01\xff")["boot_id"] == "01ff"
