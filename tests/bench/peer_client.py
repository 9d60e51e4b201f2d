# SPDX-License-Identifier: Apache-2.0
"""One client of the peer's server, through the peer's own adapters; runs in the peer's environment alone.

    python peer_client.py ORDER      ORDER: JSON with url, work, number, tokens, seconds

It stores its prompt, prints "ready", waits for a line, does its work, loads the prompt back, compares every byte, and
prints one line of JSON. ``lookup`` times lookups until their answer is known; ``cycle`` repeats lookup, free and end;
``ping`` times pings and stores nothing.
"""

import json
import os
import sys
import threading
import time

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
import zmq
from lmcache.integration.vllm import vllm_multi_process_adapter as peer

BLOCK_TOKENS, HEADS, HEAD_SIZE = 16, 1, 8
VOCABULARY = 128_000
WAIT_S = 60.0
POLL_S = 0.00005
PING_EVERY_S = 0.002
LARGEST = 0x7F
PAUSE = threading.Event()


class Client:
    """A scheduler and a worker of one engine rank without a GPU."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        context = zmq.Context()
        ranks = peer.ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        self.url, self.tokens, self.number = url, tokens, number
        self.scheduler = peer.LMCacheMPSchedulerAdapter([url], context, "bench", BLOCK_TOKENS, ranks, mq_timeout=WAIT_S)
        self.worker = peer.LMCacheMPWorkerAdapter(url, context, "bench", BLOCK_TOKENS, ranks, mq_timeout=WAIT_S)
        random = torch.Generator().manual_seed(number)
        self.prompt = torch.randint(0, VOCABULARY, (tokens,), generator=random).tolist()
        shape = (2, tokens // BLOCK_TOKENS, BLOCK_TOKENS, HEADS, HEAD_SIZE)
        self.cache = torch.randint(1, LARGEST, shape, generator=random, dtype=torch.int8).to(torch.float16)
        self.bytes = self.cache.clone()
        self.worker.register_kv_caches({"layer.0": self.cache}, layout_hints={"kv_layout": "NHD"})
        blocks = list(range(tokens // BLOCK_TOKENS))
        self.whole = peer.LoadStoreOp(token_ids=self.prompt, block_ids=[blocks], start=0, end=tokens)

    def id(self, name: str) -> str:
        """Return a request id that no other client has: the peer's server keeps requests by this alone."""
        return f"{self.number}-{name}"

    def store(self) -> None:
        """Store the prompt and wait until a lookup finds all of it."""
        request_id = self.id("store")
        self.worker.submit_store_request(request_id, self.whole, self.worker.create_recorded_event())
        self._until(lambda: request_id in (self.worker.get_finished({request_id})[0] or ()), "the store")
        self._until(self._all_there, "the stored chunks")

    def lookup(self, request_id: str) -> int:
        """Return how many tokens are found, when that is known."""
        self.scheduler.maybe_submit_lookup_request(request_id, self.prompt)
        while (found := self.scheduler.check_lookup_result(request_id)) is None:
            PAUSE.wait(POLL_S)
        return found

    def free(self, request_id: str) -> None:
        """Give a lookup's locks back and end the request; the adapter waits for no answer."""
        self.scheduler.free_lookup_locks(self.prompt, 0, self.tokens, request_id)
        self.scheduler.end_session(request_id)
        self.scheduler.cleanup_lookup_result(request_id)

    def ping(self) -> None:
        """Wait for one answer."""
        self.scheduler.req_clients[self.url].ping(None).result(timeout=WAIT_S)

    def compared(self) -> int:
        """Load the prompt into a zeroed cache and compare; returns the bytes that were."""
        request_id = self.id("load")
        if self.lookup(request_id) != self.tokens:
            raise SystemExit("the prompt is not there any more")
        self.cache.zero_()
        self.worker.submit_retrieve_request(request_id, self.whole, self.worker.create_recorded_event())
        self._until(lambda: request_id in (self.worker.get_finished(set())[1] or ()), "the load")
        if not torch.equal(self.cache, self.bytes):
            raise SystemExit("WRONG BYTES came back; no number counts")
        return self.cache.numel() * self.cache.element_size()

    def _all_there(self) -> bool:
        found = self.lookup(self.id("there"))
        self.free(self.id("there"))
        return found == self.tokens

    def _until(self, done, what: str) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > ends_s:
                raise SystemExit(f"{what} did not end")
            PAUSE.wait(0.01)


def lookups(client: Client, seconds: float) -> dict[str, object]:
    samples, ends_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        request_id = client.id(f"lookup-{len(samples)}")
        start = time.perf_counter()
        found = client.lookup(request_id)
        samples.append((time.perf_counter() - start) * 1e3)
        client.free(request_id)
        if found != client.tokens:
            raise SystemExit(f"{found} of {client.tokens} tokens found")
        client.ping()  # what was freed is done before the next one
    return {"samples_ms": samples}


def cycles(client: Client, seconds: float) -> dict[str, object]:
    start, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds:
        found = client.lookup(client.id(f"cycle-{done}"))
        client.free(client.id(f"cycle-{done}"))
        if found != client.tokens:
            raise SystemExit(f"{found} of {client.tokens} tokens found")
        done += 1
    return {"cycles": done, "seconds": now - start}


def pings(client: Client, seconds: float) -> dict[str, object]:
    samples, ends_s = [], time.monotonic() + seconds
    while time.monotonic() < ends_s:
        start = time.perf_counter()
        client.ping()
        samples.append((time.perf_counter() - start) * 1e3)
        PAUSE.wait(PING_EVERY_S)
    return {"samples_ms": samples}


def main() -> int:
    order = json.loads(sys.argv[1])
    client = Client(order["url"], order["number"], order["tokens"])
    work = {"lookup": lookups, "cycle": cycles, "ping": pings}[order["work"]]
    if order["work"] != "ping":
        client.store()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    said = work(client, order["seconds"])
    compared = 0 if order["work"] == "ping" else client.compared()
    sys.stdout.write(json.dumps(said | {"compared_bytes": compared}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the adapters' threads would wait for their heartbeats


if __name__ == "__main__":
    sys.exit(main())
