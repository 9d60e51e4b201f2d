# SPDX-License-Identifier: Apache-2.0
import logging
import threading
from time import monotonic

import pytest
from tests.fakes.clients import registration, until
from tests.fakes.scripted_server import ScriptedServer

from kvpool.client.link import Link
from kvpool.config import ClientConfig
from kvpool.model import errors
from kvpool.model.identity import ClientKind, Mode, Role
from kvpool.model.reasons import UncachedReason
from kvpool.wire import messages as m

BOTH = (Mode.CLIENT_MOVED, Mode.STREAMED)


@pytest.fixture
def server(tmp_path):
    server = ScriptedServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def link_to():
    links = []

    def make(server, kind=ClientKind.WORKER, register=True, options=None, **config):
        made = Link(ClientConfig(**({"server": server.address, "request_s": 0.5} | config)), kind, **(options or {}))
        if register:
            made.registration = registration(BOTH)
        made.start()
        links.append(made)
        return made

    yield make
    for made in links:
        made.close(0.2)


@pytest.fixture
def link(server, link_to):
    made = link_to(server)
    assert made.wait_healthy(5)
    return made


@pytest.mark.behaviour("R084")
def test_without_a_server_the_link_is_uncached_and_calls_end_at_once(tmp_path, link_to):
    link = link_to(ScriptedServer(tmp_path))

    until(lambda: link.state.reason is UncachedReason.UNREACHABLE)
    began_s = monotonic()
    call = link.submit(m.Ping(), deadline_s=30)

    assert isinstance(call.error(), errors.ServerUnavailable)
    assert monotonic() - began_s < 1
    assert not link.state.healthy


def test_a_link_that_was_not_started_is_not_healthy_and_closes(tmp_path):
    link = Link(ClientConfig(server=f"ipc://{tmp_path}/none"), ClientKind.PROBE)

    assert (link.state.healthy, link.state.reason) == (False, UncachedReason.STARTING)
    link.close()
    link.close()
    assert link.state.reason is UncachedReason.CLOSED


def test_a_server_that_was_reached_may_take_its_time_to_answer(server, link_to):
    server.hold(m.Hello, times=10)
    link = link_to(server, connect_s=0.4)
    server.wait_seen(m.Hello)

    threading.Event().wait(0.7)
    server.release()

    assert link.wait_healthy(5)
    assert len(server.of(m.Hello)) == 1, "no attempt was cut off to be begun again"


def test_a_link_that_waits_for_a_greetings_answer_closes_at_once(server, link_to):
    server.drop(m.Hello, times=10)
    link = link_to(server, connect_s=20)
    server.wait_seen(m.Hello)

    began_s = monotonic()
    link.close(0.1)

    assert monotonic() - began_s < 5
    assert link.state.reason is UncachedReason.CLOSED


@pytest.mark.behaviour("R084", "R088")
def test_a_server_that_comes_later_is_found(tmp_path, link_to):
    server = ScriptedServer(tmp_path)
    link = link_to(server)
    until(lambda: link.state.reason is UncachedReason.UNREACHABLE)

    with server:
        assert link.wait_healthy(5)


@pytest.mark.behaviour("R086")
def test_the_heart_beats_from_registration_on_without_any_traffic(server, link):
    assert server.wait_seen(m.Ping, 3)
    assert link.state.healthy


@pytest.mark.behaviour("R125")
def test_a_worker_attaches_bulk_and_registers_before_it_is_healthy(server, link):
    kinds = [type(r) for r in server.seen[:3]]

    assert kinds == [m.Hello, m.AttachBulk, m.Register]
    assert link.state.mode is Mode.CLIENT_MOVED


def test_a_probe_is_healthy_without_registration(server, link_to):
    probe = link_to(server, ClientKind.PROBE, register=False)

    assert probe.wait_healthy(5)
    assert probe.call(m.Ping())[0] == m.Pong()
    assert not server.of(m.Register)


def test_the_welcome_is_known_before_a_registration_is_set(server, link_to):
    link = link_to(server, register=False)

    welcome = link.wait_welcome(5)

    assert welcome is not None
    assert welcome.chunk_tokens == 16
    assert (link.state.healthy, link.state.reason) == (False, UncachedReason.STARTING)
    link.registration = registration(BOTH)
    assert link.wait_healthy(5)


def test_another_registration_begins_another_session(server, link):
    first = link.state.epoch

    link.registration = registration((Mode.STREAMED,), model="other")

    until(lambda: link.state.healthy and link.state.epoch > first)
    assert link.state.mode is Mode.STREAMED
    assert [r.namespace.model for r in server.of(m.Register)] == ["m", "other"]


@pytest.mark.behaviour("D062", "R127")
def test_after_a_restart_the_client_registers_again_by_itself(server, link):
    before = link.state
    server.hold(m.Stats)
    waiting = link.submit(m.Stats(), deadline_s=30)
    server.wait_seen(m.Stats)

    server.restart()

    assert waiting.wait(5)
    assert isinstance(waiting.error(), errors.Retryable)
    until(lambda: link.state.healthy and link.state.epoch > before.epoch)
    assert link.state.boot_id != before.boot_id
    assert len(server.of(m.Register)) == 2
    assert link.counters()["sessions_lost"] == 1


@pytest.mark.behaviour("D062")
def test_another_boot_id_on_the_same_connection_ends_the_session(server, link):
    epoch = link.state.epoch
    server.hold(m.Stats)
    waiting = link.submit(m.Stats(), deadline_s=30)
    server.wait_seen(m.Stats)

    server.reboot_at(m.Ping)

    assert waiting.wait(5)
    assert isinstance(waiting.error(), errors.StaleBoot)
    until(lambda: link.state.healthy and link.state.epoch > epoch)


def test_what_belongs_to_a_former_session_is_refused_in_the_next(server, link):
    old = link.state.epoch
    server.restart()
    until(lambda: link.state.healthy and link.state.epoch > old)

    call = link.submit(m.Stats(), epoch=old)

    assert isinstance(call.error(), errors.StaleBoot)
    assert not server.of(m.Stats)


@pytest.mark.behaviour("D058", "D077", "D106")
def test_hello_is_not_said_again_while_a_copy_of_the_old_session_runs(server, link):
    inside, leave = threading.Event(), threading.Event()

    def copy():
        with link.gate.copying(link.state.epoch):
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=copy)
    thread.start()
    assert inside.wait(5)
    server.restart()
    until(lambda: not link.state.healthy)

    assert not link.wait_healthy(0.5)
    assert len(server.of(m.Hello)) == 1
    leave.set()
    assert link.wait_healthy(5)
    thread.join(5)


@pytest.mark.behaviour("D055")
def test_a_lost_reply_ends_the_call_at_its_deadline_and_nothing_else(server, link):
    server.drop(m.Stats)
    began_s = monotonic()

    with pytest.raises(errors.DeadlineExceeded):
        link.call(m.Stats(), deadline_s=0.2)

    assert 0.15 < monotonic() - began_s < 2
    assert link.state.healthy
    assert link.call(m.Ping())[0] == m.Pong()


@pytest.mark.behaviour("R087")
def test_a_server_that_does_not_answer_pings_is_given_up(server, link):
    server.drop(m.Ping, 1000)

    until(lambda: not link.state.healthy)

    assert link.state.reason is UncachedReason.UNREACHABLE
    until(lambda: len(server.of(m.Hello)) > 1)


@pytest.mark.parametrize(
    ("request_type", "error", "reason"),
    [
        (m.Hello, errors.VersionMismatch("speaks 7"), UncachedReason.VERSION),
        (m.Hello, errors.SelfTestFailed("other digests"), UncachedReason.VERSION),
        (m.Hello, errors.IdentityRefused("not admitted"), UncachedReason.IDENTITY),
        (m.Register, errors.LayoutRefused("too large"), UncachedReason.LAYOUT),
        (m.Hello, errors.Draining("going"), UncachedReason.DRAINING),
        (m.AttachBulk, errors.Busy("full"), UncachedReason.UNREACHABLE),
    ],
)
@pytest.mark.behaviour("R087", "D067")
def test_a_refusal_says_its_reason_once_and_costs_only_the_cache(
    tmp_path, link_to, caplog, request_type, error, reason
):
    caplog.set_level(logging.INFO, "kvpool.client")
    with ScriptedServer(tmp_path) as server:
        server.fail(request_type, error, times=1000)
        link = link_to(server)
        until(lambda: link.state.reason is reason)

        link.wait_healthy(0.4)

        warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert str(error) in warnings[0].getMessage()
        assert not link.state.healthy


def test_a_refused_client_does_not_storm_the_server(tmp_path, link_to):
    with ScriptedServer(tmp_path) as server:
        server.fail(m.Hello, errors.VersionMismatch("speaks 7"), times=1000)
        link = link_to(server)
        until(lambda: link.state.reason is UncachedReason.VERSION)

        link.wait_healthy(1.0)

        assert len(server.of(m.Hello)) == 1


def test_a_client_that_the_server_forgot_says_hello_again(server, link):
    epoch = link.state.epoch
    server.fail(m.Stats, errors.NotRegistered("who are you"))

    with pytest.raises(errors.NotRegistered):
        link.call(m.Stats())

    until(lambda: link.state.healthy and link.state.epoch > epoch)
    assert len(server.of(m.Register)) == 2


def test_a_token_is_read_again_and_renewed_before_it_runs_out(tmp_path, link_to):
    token = tmp_path / "token"
    token.write_text("first\n")
    with ScriptedServer(tmp_path, welcome={"identity_expires_s": 1.5}) as server:
        link = link_to(server, token_file=str(token))
        assert link.wait_healthy(5)
        token.write_text("second\n")

        renewals = server.wait_seen(m.Renew)

        assert [h.credential for h in server.of(m.Hello)] == ["first"]
        assert renewals[0].credential == "second"
        assert link.state.healthy


def test_a_unix_socket_is_never_encrypted_whatever_key_is_known(server, link_to):
    link = link_to(server, server_key="Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID")

    assert link.wait_healthy(5)


def test_an_expired_identity_is_renewed_at_once(tmp_path, link_to):
    secret = tmp_path / "secret"
    secret.write_text("s")
    with ScriptedServer(tmp_path) as server:
        link = link_to(server, secret_file=str(secret))
        assert link.wait_healthy(5)
        server.fail(m.Stats, errors.IdentityExpired("too old"))

        with pytest.raises(errors.IdentityExpired):
            link.call(m.Stats())

        server.wait_seen(m.Renew)
        assert link.state.healthy


def test_a_missing_credential_file_is_an_identity_problem_with_its_path(tmp_path, server, link_to):
    link = link_to(server, token_file=str(tmp_path / "nowhere"))

    until(lambda: link.state.reason is UncachedReason.IDENTITY)

    assert "nowhere" in link.state.detail


def test_the_credential_is_never_logged(tmp_path, server, link_to, caplog):
    caplog.set_level(logging.DEBUG)
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    server.fail(m.Hello, errors.IdentityRefused("wrong secret"))

    link = link_to(server, secret_file=str(secret))
    until(lambda: link.state.reason is UncachedReason.IDENTITY)

    assert "open sesame" not in caplog.text


def test_draining_takes_no_new_work_but_ends_what_was_begun(server, link):
    epoch = link.state.epoch
    server.fail(m.Lookup, errors.Draining("going"))
    with pytest.raises(errors.Draining):
        link.call(m.Lookup(request_id="r", lookup_id=bytes(16)), (b"",))
    until(lambda: link.state.reason is UncachedReason.DRAINING)

    assert isinstance(link.submit(m.Ping()).error(), errors.ServerUnavailable)
    assert link.submit(m.Ping(), epoch=epoch).result()[0] == m.Pong()


def test_a_heartbeat_tells_of_a_drain_before_anything_is_refused(server, link):
    server.instead(m.Ping, m.Pong(draining=True), times=1000)

    until(lambda: link.state.reason is UncachedReason.DRAINING)

    assert not server.of(m.Lookup)


def test_the_engine_may_refuse_a_server_with_another_chunk(server, link_to):
    link = link_to(server, options={"accept": lambda _: UncachedReason.CHUNK_TOKENS})

    until(lambda: link.state.reason is UncachedReason.CHUNK_TOKENS)

    assert not server.of(m.Register)


def test_an_unexpected_exception_costs_a_session_and_is_counted(server, link_to, caplog):
    failures = [ZeroDivisionError("made up")]

    def accept(welcome):
        if failures:
            raise failures.pop()

    link = link_to(server, options={"accept": accept})
    until(lambda: link.state.reason is UncachedReason.FAULT)

    assert link.wait_healthy(5)
    assert link.counters()["link_faults"] == 1
    assert "made up" in caplog.text


def test_a_callback_that_raises_does_not_disturb_the_link(server, link_to):
    def on_state(state):
        raise ZeroDivisionError("made up")

    assert link_to(server, options={"on_state": on_state}).wait_healthy(5)


@pytest.mark.behaviour("R079")
def test_no_more_requests_are_unanswered_than_the_server_allows(tmp_path, link_to):
    limits = m.Limits(frame_bytes=1 << 16, chunks=100, in_flight=10, bulk_window=2)
    with ScriptedServer(tmp_path, limits=limits) as server:
        link = link_to(server)
        assert link.wait_healthy(5)
        server.hold(m.Stats, 1000)
        server.hold(m.ReadChunk, 1000)
        calls = [link.submit(m.Stats(), deadline_s=10) for _ in range(50)]
        read = m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=1)
        calls += [link.submit(read, deadline_s=10, bulk=True) for _ in range(50)]
        server.wait_seen(m.Stats, 7)
        server.wait_seen(m.ReadChunk, 2)
        server.wait_seen(m.Ping, len(server.of(m.Ping)) + 2)

        assert (len(server.of(m.Stats)), len(server.of(m.ReadChunk))) == (7, 2)
        assert link.state.healthy, "pings pass the window"


@pytest.mark.parametrize(("length", "under_way"), [(1, 6), (20_000, 6), (40_000, 3), (1 << 16, 2)])
def test_small_bulk_frames_may_be_more_than_the_window(tmp_path, link_to, length, under_way):
    limits = m.Limits(frame_bytes=1 << 16, chunks=100, in_flight=30, bulk_window=2, bulk_frames=6)
    with ScriptedServer(tmp_path, limits=limits) as server:
        link = link_to(server)
        assert link.wait_healthy(5)
        server.hold(m.ReadChunk, 1000)
        read = m.ReadChunk(lookup_id=bytes(16), chunk=0, offset=0, length=length)
        calls = [link.submit(read, deadline_s=10, bulk=True) for _ in range(20)]
        server.wait_seen(m.ReadChunk, under_way)
        server.wait_seen(m.Ping, len(server.of(m.Ping)) + 2)

        assert len(server.of(m.ReadChunk)) == under_way
        assert not any(call.done() for call in calls)


def test_the_queue_before_a_slow_server_is_bounded_and_submit_never_blocks(server, link):
    server.hold(m.Stats, 100)
    began_s = monotonic()
    calls = [link.submit(m.Stats(), deadline_s=20) for _ in range(20_000)]

    until(lambda: any(isinstance(c.error(), errors.Busy) for c in calls))
    assert sum(not c.done() for c in calls) < 9000
    assert monotonic() - began_s < 10


@pytest.mark.parametrize("reply", [m.Freed(chunks=1), m.Registered(mode=Mode.STREAMED, reason="")])
def test_an_answer_of_another_kind_is_an_error(server, link, reply):
    server.instead(m.Stats, reply)

    with pytest.raises(errors.Malformed):
        link.call(m.Stats())


def test_an_error_code_of_a_newer_server_is_still_an_error(server, link):
    server.instead(m.Stats, m.Failed(code="invented_later", detail="?"))

    with pytest.raises(errors.CacheError):
        link.call(m.Stats())


@pytest.mark.behaviour("R109", "R130", "D066", "D075")
def test_close_says_goodbye_and_the_heart_stops(server, link):
    link.close(2)
    pings = len(server.of(m.Ping))
    link.close(2)

    assert len(server.of(m.Unregister)) == 1
    assert link.state.reason is UncachedReason.CLOSED
    assert isinstance(link.submit(m.Ping()).error(), errors.ServerUnavailable)
    assert not threading.Event().wait(0.3)
    assert len(server.of(m.Ping)) == pings
    assert not [t for t in threading.enumerate() if t.name == "kvpool-link"]


@pytest.mark.behaviour("R109")
def test_close_does_not_wait_for_ever_for_a_server_that_does_not_answer(server, link):
    server.hold(m.Unregister)
    began_s = monotonic()

    link.close(0.3)

    assert monotonic() - began_s < 1.5


@pytest.mark.behaviour("D045")
def test_close_ends_the_calls_under_way(server, link):
    server.hold(m.Stats)
    call = link.submit(m.Stats(), deadline_s=30)
    server.wait_seen(m.Stats)
    server.hold(m.Unregister)

    link.close(0.1)

    assert isinstance(call.error(), errors.ServerUnavailable)


@pytest.mark.behaviour("D063", "R122")
def test_client_ids_are_random_and_kept_over_sessions(server, link, link_to):
    other = link_to(server)
    assert other.wait_healthy(5)
    server.restart()
    until(lambda: link.state.epoch == 2 and other.state.epoch == 2)

    ids = [h.client_id for h in server.of(m.Hello)]

    assert sorted(ids) == sorted([link.client_id, other.client_id] * 2)
    assert link.client_id != other.client_id, "of one process"


def test_the_role_goes_out_with_hello(server, link_to):
    link = link_to(server, options={"role": Role.CONSUMER})

    assert link.wait_healthy(5)
    assert server.of(m.Hello)[0].role is Role.CONSUMER


def test_without_a_descriptor_socket_client_moved_is_not_offered(tmp_path, link_to):
    with ScriptedServer(tmp_path, welcome={"descriptor_socket": ""}) as server:
        link = link_to(server)

        assert link.wait_healthy(5)
        assert server.of(m.Register)[0].modes == (Mode.STREAMED,)
        assert link.segments is None


def test_a_useless_address_is_unreachable_not_an_exception(link_to):
    class Nowhere:
        address = "ipc://" + "x" * 200

    link = link_to(Nowhere())

    until(lambda: link.state.reason is UncachedReason.UNREACHABLE)
    assert "cannot be used" in link.state.detail


@pytest.mark.behaviour("D051", "R097")
@pytest.mark.parametrize("request_type", [m.Hello, m.AttachBulk, m.Register])
def test_a_handshake_without_an_answer_ends_in_its_time_and_is_tried_again(tmp_path, link_to, request_type):
    with ScriptedServer(tmp_path) as server:
        server.drop(request_type, 1)
        began_s = monotonic()
        link = link_to(server, connect_s=0.3, request_s=0.3)

        until(lambda: link.state.reason is UncachedReason.UNREACHABLE)
        assert monotonic() - began_s < 1.5
        assert not link.state.healthy

        assert link.wait_healthy(5)


@pytest.mark.behaviour("D051", "R082")
def test_a_call_without_a_deadline_of_its_own_has_the_configured_one(server, link):
    server.drop(m.Stats)
    began_s = monotonic()

    with pytest.raises(errors.DeadlineExceeded):
        link.call(m.Stats())

    assert 0.4 < monotonic() - began_s < 2


@pytest.mark.behaviour("D044")
@pytest.mark.parametrize(
    "name", ["half a surrogate: " + chr(0xD800), object()], ids=["text that is no UTF-8", "another type"]
)
def test_a_request_that_cannot_be_encoded_fails_alone(server, link, name):
    epoch = link.state.epoch
    server.hold(m.Renew)
    before = link.submit(m.Renew(credential=""), deadline_s=5)

    bad = link.submit(m.EndRequest(request_id=name), deadline_s=30)

    assert bad.wait(2)
    assert isinstance(bad.error(), errors.Malformed)
    server.release()
    assert before.result()
    assert link.call(m.Ping())[0] == m.Pong()
    assert (link.state.epoch, link.counters()["link_faults"]) == (epoch, 0)


@pytest.mark.behaviour("D032")
def test_a_server_that_answers_something_is_not_taken_for_dead(server, link):
    server.drop(m.Ping, 1000)
    began_s = monotonic()

    while monotonic() - began_s < 1.5:
        link.call(m.Renew(credential=""))

    assert link.counters()["sessions_lost"] == 0


@pytest.mark.behaviour("D069", "R088")
def test_a_schedulers_heart_beats_and_finds_its_server_again(server, link_to):
    link = link_to(server, ClientKind.SCHEDULER)
    assert link.wait_healthy(5)
    server.wait_seen(m.Ping, 2)

    server.restart()

    until(lambda: link.state.healthy and link.state.epoch == 2)
    server.wait_seen(m.Ping, len(server.of(m.Ping)) + 2)


@pytest.mark.behaviour("R128")
def test_a_client_without_a_registration_recovers_by_its_hello_alone(server, link_to):
    probe = link_to(server, ClientKind.PROBE, register=False)
    assert probe.wait_healthy(5)

    server.restart()

    until(lambda: probe.state.healthy and probe.state.epoch == 2)
    assert len(server.of(m.Hello)) == 2
    assert not server.of(m.Register)


@pytest.mark.behaviour("R129")
@pytest.mark.parametrize("request_type", [m.Hello, m.AttachBulk, m.Register])
def test_a_link_that_is_being_closed_does_not_become_healthy(tmp_path, link_to, request_type):
    states = []
    with ScriptedServer(tmp_path) as server:
        server.hold(request_type)
        link = link_to(server, options={"on_state": states.append})
        server.wait_seen(request_type)
        closing = threading.Thread(target=link.close, args=(0.5,))
        closing.start()
        until(lambda: link._keeper._stopping)

        server.release()
        closing.join(10)

        assert not closing.is_alive()
    assert link.state.reason is UncachedReason.CLOSED
    assert not any(state.healthy for state in states)


@pytest.mark.behaviour("R136")
def test_recovery_and_closing_may_meet(server, link_to, caplog):
    for pause_s in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1):
        link = link_to(server)
        assert link.wait_healthy(5)
        server.restart()

        threading.Event().wait(pause_s)  # another moment of the recovery each time
        link.close(0.5)

        assert link.state.reason is UncachedReason.CLOSED
        assert link.counters()["link_faults"] == 0
    assert not [t for t in threading.enumerate() if t.name == "kvpool-link"]
    assert not [r for r in caplog.records if r.exc_info]
