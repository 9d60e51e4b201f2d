# SPDX-License-Identifier: Apache-2.0
"""The protocol is complete, and a change of it is a visible diff."""

import typing
from typing import Any, get_args

import msgspec
import pytest
from tests.architecture.source import ROOT

from kvpool.model.errors import BY_CODE, CacheError, Refused, Retryable
from kvpool.wire import messages
from kvpool.wire.messages import AnyReply, AnyRequest, Envelope, Failed, Reply, ReplyEnvelope, Request

GOLDEN = ROOT / "tests/golden/protocol.json"


def subclasses(base: type) -> set[type]:
    return {c for c in vars(messages).values() if isinstance(c, type) and issubclass(c, base) and c is not base}


def reply_of(request: type) -> Any:
    (base,) = (b for b in request.__orig_bases__ if typing.get_origin(b) is Request)  # type: ignore[attr-defined]
    (reply,) = get_args(base)
    return reply


def test_every_message_is_in_its_union() -> None:
    assert set(get_args(AnyRequest)) == subclasses(Request)
    assert set(get_args(AnyReply)) == subclasses(Reply)


@pytest.mark.behaviour("R069")
def test_every_request_names_a_reply_of_the_union_and_no_reply_is_unused() -> None:
    replies = {reply_of(r) for r in get_args(AnyRequest)}

    assert replies | {Failed} == set(get_args(AnyReply))


def test_tags_are_unique() -> None:
    for union in (AnyRequest, AnyReply):
        tags = [c.__struct_config__.tag for c in get_args(union)]
        assert len(tags) == len(set(tags))


def walk(cls: type) -> list[type]:
    return [cls, *(s for c in cls.__subclasses__() if c.__module__ == cls.__module__ for s in walk(c))]


def test_every_error_has_its_own_code_and_says_what_the_caller_can_do() -> None:
    branches = {CacheError, Retryable, Refused}
    concrete = set(walk(CacheError)) - branches

    assert {BY_CODE[c.code] for c in concrete} == concrete  # type: ignore[attr-defined]
    assert all(issubclass(c, Retryable | Refused) for c in concrete)


def described() -> bytes:
    schemas = {t.__name__: msgspec.json.schema(t) for t in (Envelope, ReplyEnvelope)}
    schemas |= {"requests": msgspec.json.schema(AnyRequest), "replies": msgspec.json.schema(AnyReply)}
    return msgspec.json.format(msgspec.json.encode(schemas, order="deterministic"), indent=1) + b"\n"


@pytest.mark.behaviour("D047")
def test_the_protocol_is_the_reviewed_one() -> None:
    """A message changed: check that it keeps one release of skew, then `make golden` and review the diff."""
    assert GOLDEN.read_bytes() == described()
