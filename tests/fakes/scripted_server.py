# SPDX-License-Identifier: Apache-2.0
"""A server whose every answer a test may decide: hold it, drop it, fail it, or change the boot id before it.

One thread owns the ROUTER; what no rule touches is answered by a TinyEngine.
"""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import zmq
from tests.fakes.tiny_engine import REGION_BYTES, TinyEngine

from kvpool.model.errors import CacheError, NotRegistered
from kvpool.model.keys import self_test
from kvpool.wire import codec, descriptors
from kvpool.wire import messages as m

LIMITS = m.Limits(frame_bytes=64 << 10, chunks=8192, in_flight=64, bulk_window=4)


class ScriptedServer:
    def __init__(self, folder: Path, *, engine=None, limits=LIMITS, heartbeat_s=0.1, welcome=None):
        self.path = str(folder / "kvpool.sock")
        self.address = f"ipc://{self.path}"
        self.engine = engine or TinyEngine()
        self.limits = limits
        self.heartbeat_s = heartbeat_s
        self.welcome = welcome or {}
        self.boot_id = os.urandom(16)
        self.seen: list[m.Request] = []
        self._news = threading.Condition()
        self._rules: dict[type, list] = {}
        self._held: list[tuple] = []
        self._clients: dict[bytes, bytes] = {}
        self._tickets: dict[bytes, bytes] = {}
        self._thread = None

    # --- for the test's thread

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self.stop()

    def start(self):
        self._stopping = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,), daemon=True)
        self._thread.start()
        assert bound.wait(5)

    def stop(self):
        """Die as a process would: connections break, nothing is answered."""
        if self._thread is not None:
            self._stopping = True
            self._wake()
            self._thread.join(5)
            assert not self._thread.is_alive()
            self._thread = None
            os.close(self._wakeup)
            for path in (self.path, self.path + descriptors.SUFFIX):
                Path(path).unlink(missing_ok=True)

    def restart(self, *, keep=True):
        """Die and come back under another boot id; *keep*: with the chunks, as from shared memory."""
        self.stop()
        self.boot_id = os.urandom(16)
        self.engine.clients.clear()
        self.engine.lookups.clear()
        if not keep:
            self.engine.slots.clear()
        self.start()

    def hold(self, request, times=1):
        """Answer the next *times* requests of this type only after ``release``."""
        self._rule(request, times, "hold")

    def drop(self, request, times=1):
        """Never answer the next *times* requests of this type."""
        self._rule(request, times, "drop")

    def fail(self, request, error, times=1):
        """Answer the next *times* requests of this type with *error*."""
        self._rule(request, times, error)

    def die_at(self, request):
        """Stop, unanswered, when a request of this type comes."""
        self._rule(request, 1, "die")

    def reboot_at(self, request):
        """Answer a request of this type, and all later ones, under another boot id and without any client."""
        self._rule(request, 1, "reboot")

    def instead(self, request, reply, frames=(), times=1):
        """Answer the next *times* requests of this type with *reply*."""
        self._rule(request, times, (reply, list(frames)))

    def release(self):
        """Answer all that is held."""
        self._releasing = True
        self._wake()

    def wait_seen(self, request, times=1, timeout_s=5.0):
        """Wait until *times* requests of a type came; returns them."""
        with self._news:
            found = self._news.wait_for(lambda: len(self.of(request)) >= times, timeout_s)
        assert found, f"{len(self.of(request))} of {times} {request.__name__} came"
        return self.of(request)

    def of(self, request):
        return [r for r in self.seen if type(r) is request]

    # --- the server's thread

    def _rule(self, request, times, what):
        with self._news:
            self._rules.setdefault(request, []).extend([what] * times)

    def _wake(self):
        os.eventfd_write(self._wakeup, 1)

    def _run(self, bound):
        context = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(self.address)
        self._releasing = False
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path + descriptors.SUFFIX)
        listener.listen()
        self._streams = {}
        bound.set()
        try:
            self._loop(listener)
        finally:
            self._held.clear()
            for stream, _ in self._streams.values():
                stream.close()
            listener.close()
            context.destroy(linger=0)

    def _loop(self, listener):
        poller = zmq.Poller()
        for source in (self._router, self._wakeup, listener):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            for source, _ in poller.poll():
                if source is self._router:
                    while not self._stopping and self._receive():
                        pass
                elif source == self._wakeup:
                    self._woken()
                elif source == listener.fileno():
                    stream, _ = listener.accept()
                    self._streams[stream.fileno()] = (stream, bytearray())
                    poller.register(stream.fileno(), zmq.POLLIN)
                elif source in self._streams and not self._descriptor(*self._streams[source]):
                    poller.unregister(source)
                    self._streams.pop(source)[0].close()

    def _woken(self):
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        if self._releasing:
            self._releasing = False
            held, self._held = self._held, []
            for item in held:
                self._answer(*item)

    def _receive(self):
        try:
            sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        envelope, request = codec.decode_envelope(frames), codec.decode_request(frames[1])
        with self._news:
            rules = self._rules.get(type(request))
            rule = rules.pop(0) if rules else None
            self.seen.append(request)
            self._news.notify_all()
        self._apply(rule, sender, envelope, request, frames[2:])
        return True

    def _apply(self, rule, sender, envelope, request, frames):
        if rule == "hold":
            self._held.append((sender, envelope, request, frames))
        elif rule == "die":
            self._stopping = True
        elif isinstance(rule, CacheError):
            self._send(sender, envelope, codec.encode_failure(rule), [])
        elif isinstance(rule, tuple):
            self._send(sender, envelope, *rule)
        elif rule != "drop":
            if rule == "reboot":
                self.boot_id = os.urandom(16)
                self._clients.clear()
                self.engine.clients.clear()
                self.engine.lookups.clear()
            self._answer(sender, envelope, request, frames)

    def _answer(self, sender, envelope, request, frames):
        try:
            reply, out = self._reply(sender, request, frames)
        except CacheError as e:
            reply, out = codec.encode_failure(e), []
        self._send(sender, envelope, reply, out)

    def _send(self, sender, envelope, reply, frames):
        head = codec.encode_reply(m.ReplyEnvelope(envelope.version, envelope.request_id, self.boot_id), reply)
        self._router.send_multipart([sender, *head, *frames])

    def _reply(self, sender, request, frames):
        if isinstance(request, m.Hello):
            assert request.self_test == self_test()
            self.engine.hello(request.client_id)
            self._clients[sender] = request.client_id
            ticket = os.urandom(16)
            self._tickets[ticket] = request.client_id
            return self._greet(ticket), []
        if isinstance(request, m.AttachBulk):
            if request.ticket not in self._tickets:
                raise NotRegistered("unknown ticket")
            self._clients[sender] = self._tickets[request.ticket]
            return m.Attached(), []
        if sender not in self._clients:
            raise NotRegistered("say Hello first")
        return self.engine.answer(self._clients[sender], request, frames)

    def _greet(self, ticket):
        fields = {
            "version": 1,
            "server_id": "scripted",
            "server_version": "0",
            "chunk_tokens": 16,
            "tenant": "default",
            "limits": self.limits,
            "heartbeat_s": self.heartbeat_s,
            "lookup_lease_s": 60.0,
            "store_lease_s": 60.0,
            "ticket": ticket,
            "descriptor_socket": self.path + descriptors.SUFFIX,
        }
        return m.Welcome(**(fields | self.welcome))

    def _descriptor(self, stream, buffer):
        data = stream.recv(4096)
        buffer += data
        while (request := descriptors.take_request(buffer)) is not None:
            if isinstance(request, descriptors.Attach):
                granted = descriptors.Granted(boot_id=self.boot_id, regions=1, region_bytes=REGION_BYTES)
                stream.sendall(descriptors.pack(granted))
            else:
                flags = os.O_RDWR if request.writable else os.O_RDONLY
                fresh = os.open(f"/proc/self/fd/{self.engine.memfd}", flags | os.O_CLOEXEC)
                region = descriptors.Region(memory=request.memory, length=REGION_BYTES, writable=request.writable)
                socket.send_fds(stream, [descriptors.pack(region)], [fresh])
                os.close(fresh)
        return bool(data)
