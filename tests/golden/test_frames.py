# SPDX-License-Identifier: Apache-2.0
"""One recorded frame of every message: what released clients send must decode for ever, and a change is a visible diff.

``python -m tests.golden.test_frames`` records them again; review the diff: only new messages and new fields with
defaults may appear.
"""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvpool.model.identity import ClientKind, GroupKind, GroupSpec, Mode, Namespace, Role
from kvpool.wire import descriptors as d
from kvpool.wire import messages as m

FRAMES = Path(__file__).parent / "frames" / "protocol-1.json"

ID = bytes(range(16))
NAMESPACE = Namespace(
    model="org/model",
    model_fingerprint="0123",
    dtype="bfloat16",
    kv_dtype="fp8",
    layout="abcd",
    hash_algorithm="blake3-chain-1",
    shard_count=2,
    parallel="tp2",
    adapter="lora-1",
)
GROUPS = (
    GroupSpec(kind=GroupKind.FULL, shard_bytes=1 << 20),
    GroupSpec(kind=GroupKind.WINDOW, shard_bytes=4096, window_tokens=512),
    GroupSpec(kind=GroupKind.STATE, shard_bytes=8192),
)
LIMITS = m.Limits(frame_bytes=4 << 20, chunks=8192, in_flight=256, bulk_window=4, bulk_frames=64)

RING = m.RingFacts(device=ID, handle=ID * 4, slot_bytes=1 << 25, slots=4, generation=2)
CACHE = m.CacheFacts(device=ID, slot_bytes=1 << 25, slots=4, generation=2)

REQUESTS = (
    m.Hello(
        version_min=1,
        version_max=1,
        kind=ClientKind.WORKER,
        client_id=ID,
        self_test=ID * 2,
        role=Role.PRODUCER,
        client_version="0.1.0",
        label="pod-0",
        credential="text",
        features=("x",),
    ),
    m.AttachBulk(ticket=ID),
    m.Renew(credential="text"),
    m.Register(
        namespace=NAMESPACE,
        groups=GROUPS,
        shards=(0, 1),
        readers=2,
        modes=(Mode.RING, Mode.STREAMED),
        ring=RING,
        process_id=7,
        no_ring="why",
        cache=CACHE,
    ),
    m.WatchRing(joined=True, retired="why", wait_s=1.5),
    m.Unregister(),
    m.Lookup(request_id="r-1", lookup_id=ID, shards=(0, 1)),
    m.LookupStatus(lookup_id=ID, wait_s=1.5),
    m.FreeLookup(lookup_id=ID, first=1, end=9),
    m.PrepareStore(request_id="r-1", store_id=ID, group=1, shard=1, first=3, parent=ID * 2),
    m.WriteChunk(store_id=ID, chunk=3, offset=4096),
    m.CommitStore(store_id=ID, checksum_kind=1),
    m.PrepareRetrieve(lookup_id=ID, group=1, shard=1, first=2, end=5),
    m.ReadChunk(lookup_id=ID, chunk=2, offset=4096, length=4096, group=1, shard=1),
    m.CommitRetrieve(lookup_id=ID, group=1, shard=1, first=2, end=5),
    m.EndRequest(request_id="r-1"),
    m.Clear(model="org/model", forced=True),
    m.Subscribe(after=7),
    m.Stats(),
    m.Locate(server_id="node-2"),
    m.Ping(),
)

REPLIES = (
    m.Failed(code="busy", detail="why"),
    m.Welcome(
        version=1,
        server_id="node-1",
        server_version="0.1.0",
        chunk_tokens=256,
        tenant="team",
        limits=LIMITS,
        heartbeat_s=1.0,
        lookup_lease_s=60.0,
        store_lease_s=60.0,
        ticket=ID,
        descriptor_socket="kvpool.sock.fd",
        identity_expires_s=600.0,
        features=("x",),
    ),
    m.Attached(),
    m.Renewed(identity_expires_s=600.0),
    m.Registered(mode=Mode.STREAMED, reason="why"),
    m.RingNews(state=m.RingState.READY, address="unix:kvpool.sock.m1", secret=ID, reason="why"),
    m.Unregistered(known=True),
    m.Found(chunks=3, coming=2, reason="missing"),
    m.Freed(chunks=3),
    m.Prepared(write=3, grant=ID),
    m.Wrote(),
    m.Stored(stored=3),
    m.Readable(chunks=3, grant=ID),
    m.Bytes(),
    m.Retrieved(vouched=3),
    m.Ended(leases=1),
    m.Cleared(chunks=3, kept=1),
    m.Events(sequence=9, snapshot=True, more=True),
    m.Statistics(
        server_id="node-1",
        server_version="0.1.0",
        uptime_s=1.5,
        ready=True,
        draining=False,
        chunk_tokens=256,
        l1_bytes=1 << 30,
        l1_used_bytes=1 << 20,
        l1_pinned_bytes=4096,
        chunks=3,
        clients=1,
        sessions=1,
        leases=1,
        oldest_lease_s=0.5,
        counters={'kvpool_lookups_total{reason="all"}': 1.0},
    ),
    m.Located(addresses=("tcp://192.0.2.2:7410",)),
    m.Pong(),
)

DESCRIPTOR_MESSAGES = (
    d.Attach(ticket=ID),
    d.MapRegion(memory=3, writable=True),
    d.Granted(boot_id=ID, regions=4, region_bytes=1 << 30),
    d.Region(memory=3, length=1 << 30, writable=True),
)

EXAMPLES = (
    ("envelope", m.Envelope(1, 7, 2000), m.Envelope),
    ("reply envelope", m.ReplyEnvelope(1, 7, ID), m.ReplyEnvelope),
    *((f"request {x.__struct_config__.tag}", x, m.AnyRequest) for x in REQUESTS),
    *((f"reply {x.__struct_config__.tag}", x, m.AnyReply) for x in REPLIES),
    *(
        (f"descriptor {x.__struct_config__.tag}", x, d.AnyDescriptorRequest | d.AnyDescriptorReply)
        for x in DESCRIPTOR_MESSAGES
    ),
)


def recorded():
    """Return the frames as they are now, as the text of the file."""
    frames = {name: msgspec.msgpack.encode(example).hex() for name, example, _ in EXAMPLES}
    return json.dumps(frames, indent=1) + "\n"


def test_every_message_has_a_recorded_frame():
    assert {type(x) for x in REQUESTS} == set(get_args(m.AnyRequest))
    assert {type(x) for x in REPLIES} == set(get_args(m.AnyReply))
    described = set(get_args(d.AnyDescriptorRequest)) | set(get_args(d.AnyDescriptorReply)) - {m.Failed}
    assert {type(x) for x in DESCRIPTOR_MESSAGES} == described


def test_messages_are_encoded_as_recorded():
    assert FRAMES.read_text() == recorded()


@pytest.mark.behaviour("D047", "D083")
@pytest.mark.parametrize(("name", "example", "kind"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_recorded_frames_still_decode_to_the_same(name, example, kind):
    frame = bytes.fromhex(json.loads(FRAMES.read_text())[name])

    assert msgspec.msgpack.decode(frame, type=kind) == example


@pytest.mark.parametrize("example", [*REQUESTS, *REPLIES, *DESCRIPTOR_MESSAGES], ids=lambda x: type(x).__name__)
def test_a_field_of_a_newer_version_is_ignored(example):
    kinds = m.AnyRequest if example in REQUESTS else m.AnyReply
    kinds = d.AnyDescriptorRequest | d.AnyDescriptorReply if example in DESCRIPTOR_MESSAGES else kinds
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(example)) | {"from_the_future": [1, {"x": b"y"}]}

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=kinds) == example


if __name__ == "__main__":
    FRAMES.write_text(recorded())
