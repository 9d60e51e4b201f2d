# SPDX-License-Identifier: Apache-2.0
"""Certificates over time: what is served is always trusted, and no key that signs is kept."""

import datetime as dt
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.admission.authority import Certificates, Step, due, issue, taken, trusts

NAMES = ("kvpool-webhook.system.svc",)
START = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
LIFE_S, SETTLE_S = 90 * 86400.0, 60.0


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def next_of(found: Certificates, now: dt.datetime, names: tuple[str, ...] = NAMES) -> Certificates:
    made = taken(found, names, now, LIFE_S, SETTLE_S)
    assert made is not None
    return made


def step(found: Certificates, now: dt.datetime, names: tuple[str, ...] = NAMES) -> Step:
    return due(found, names, now, LIFE_S, SETTLE_S)


def test_a_life_from_nothing_to_the_second_rotation() -> None:
    first = next_of(Certificates(), START)
    assert first.current is not None
    assert step(first, at(1)) is Step.KEEP
    assert step(first, at(LIFE_S * 0.6)) is Step.KEEP

    staged = next_of(first, at(LIFE_S * 0.7))
    assert staged.current == first.current
    assert staged.bundle.count(b"BEGIN") == 2
    assert step(staged, at(LIFE_S * 0.7 + SETTLE_S - 1)) is Step.KEEP

    switched = next_of(staged, at(LIFE_S * 0.7 + SETTLE_S))
    assert switched.current == staged.next
    assert switched.old == first.current.authority
    assert step(switched, at(LIFE_S * 0.7 + 2 * SETTLE_S - 1)) is Step.KEEP

    alone = next_of(switched, at(LIFE_S * 0.7 + 2 * SETTLE_S))
    assert alone.bundle.count(b"BEGIN") == 1
    assert step(alone, at(LIFE_S)) is Step.KEEP


@given(st.lists(st.floats(min_value=0.0, max_value=LIFE_S / 2), min_size=1, max_size=12))
def test_whenever_somebody_looks_what_is_served_is_trusted_before_and_after(gaps: list[float]) -> None:
    """A server that still has the former state, and an API server that still has the former bundle, understand each
    other, unless nobody looked for so long that everything had ended."""
    now, found = START, next_of(Certificates(), START)
    for gap in gaps:
        now += dt.timedelta(seconds=gap)
        action = step(found, now)
        made = taken(found, NAMES, now, LIFE_S, SETTLE_S) or found
        assert made.current is not None
        assert found.current is not None
        assert trusts(made.bundle, made.current.certificate)
        if action is not Step.ISSUE:
            assert trusts(found.bundle, made.current.certificate)
            assert trusts(made.bundle, found.current.certificate)
        found = made


def test_nothing_that_signs_is_kept() -> None:
    staged = next_of(next_of(Certificates(), START), at(LIFE_S * 0.7))

    keys = [name for name, value in staged.data().items() if b"PRIVATE KEY" in value]
    assert keys == ["tls.key", "next-tls.key"]
    assert Certificates.of(staged.data()) == staged


def test_another_name_or_an_end_asks_for_a_new_one_at_once_and_the_former_is_trusted_on() -> None:
    first = next_of(Certificates(), START)
    assert first.current is not None

    for now, names in ((at(1), ("renamed.system.svc",)), (at(LIFE_S), NAMES)):
        assert step(first, now, names) is Step.ISSUE
        assert trusts(next_of(first, now, names).bundle, first.current.certificate)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tls.crt": b"x", "tls.key": b"y", "ca.crt": b"z"},
        {"since": b"yesterday"},
        {"tls.crt": b"\xff", "since": b"\xff"},
    ],
)
def test_what_is_damaged_is_made_anew(data: dict[str, bytes]) -> None:
    found = Certificates.of(data)

    assert step(found, START) is Step.ISSUE
    assert next_of(found, START).current is not None


def test_a_foreign_authority_does_not_pass() -> None:
    first = next_of(Certificates(), START)
    assert first.current is not None
    mixed = replace(first, current=replace(first.current, authority=issue(NAMES, START, LIFE_S).authority))

    assert step(mixed, at(1)) is Step.ISSUE
    assert not trusts(b"", first.current.certificate)
    assert not trusts(mixed.bundle, first.current.certificate)


def test_a_tls_client_verifies_it_by_name(tmp_path: Path) -> None:
    pair = issue([*NAMES, "127.0.0.1"], dt.datetime.now(dt.UTC), 3600.0)
    (tmp_path / "crt").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    client = ssl.create_default_context(cadata=pair.authority.decode())

    for name, well in ((NAMES[0], True), ("127.0.0.1", True), ("other.svc", False)):
        assert shake(client, server, name) is well


def shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> bool:
    """A handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    two = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(8):
        for side in (one, two):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return True
