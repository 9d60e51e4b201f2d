# SPDX-License-Identifier: Apache-2.0
"""Who has which mover."""

from kvpool.model.identity import ClientKind, Mode
from kvpool.server.calls import Client
from kvpool.server.mover_table import MoverNumbers, MoverRow, mover_table
from kvpool.server.sockets import Origin, Peer

ANNE, BERT = b"a" * 16, b"b" * 16


def client(client_id: bytes, kind: ClientKind = ClientKind.WORKER, **fields: object) -> Client:
    made = Client(
        client_id=client_id,
        kind=kind,
        tenant="t",
        label=client_id[:1].decode(),
        ticket=b"",
        peer=Peer(Origin.UNIX, client_id),
        seen_s=0.0,
        expires_s=None,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


SHOWN = {
    "pid": 7,
    "gpu": "GPU-1",
    "state": "ready",
    "joined": True,
    "slots": 4,
    "slot_bytes": 32,
    "stored_bytes": 64,
    "loaded_bytes": 96,
    "age_s": 2.5,
}


def mover(client_id: bytes = ANNE) -> MoverNumbers:
    return MoverNumbers(client_id=client_id, reason="", **SHOWN)


def test_a_worker_with_a_mover_is_one_row() -> None:
    anne = client(ANNE, mode=Mode.RING, mode_reason="the client has a ring")

    assert mover_table([anne], [mover()]) == [
        MoverRow(
            client_id=ANNE.hex(),
            label="a",
            mode="ring",
            mode_reason="the client has a ring",
            **SHOWN,
        )
    ]


def test_a_worker_without_a_mover_says_why() -> None:
    bert = client(BERT, mode=Mode.STREAMED, mode_reason="no ring")

    assert mover_table([bert], []) == [
        MoverRow(client_id=BERT.hex(), label="b", mode="streamed", mode_reason="no ring")
    ]


def test_a_mover_that_outlives_its_client_is_seen() -> None:
    (row,) = mover_table([], [mover()])

    assert (row.pid, row.mode, row.mode_reason) == (7, "", "the client is gone")


def test_schedulers_and_probes_move_nothing() -> None:
    assert mover_table([client(ANNE, ClientKind.SCHEDULER), client(BERT, ClientKind.PROBE)], []) == []
