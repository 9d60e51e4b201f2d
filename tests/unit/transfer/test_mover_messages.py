# SPDX-License-Identifier: Apache-2.0
"""What a mover and a client of the release before or after say to each other."""

import msgspec

from kvpool.transfer.mover.messages import Move, Moved
from kvpool.transfer.pipe import Frames, frame


class FormerMoved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """As in the first release."""

    turn: int
    error: str = ""
    copy_s: float = 0.0


FORMER_MOVE = msgspec.msgpack.encode(
    {"type": "move", "turn": 1, "slot": 0, "grant": b"g", "offset": 0, "length": 8, "chunks": (0, 1)}
)


def heard(message: msgspec.Struct, incoming: type) -> msgspec.Struct | None:
    frames: Frames[msgspec.Struct] = Frames(incoming)
    frames.feed(frame(message))
    return frames.next()


def test_a_former_client_takes_a_move_with_wrong_chunks_for_failed() -> None:
    moved = heard(Moved(turn=3, error="a chunk is not what was stored", wrong=(2,)), FormerMoved)

    assert moved == FormerMoved(turn=3, error="a chunk is not what was stored")


def test_a_former_movers_answer_has_no_wrong_chunks() -> None:
    assert heard(FormerMoved(turn=3), Moved) == Moved(turn=3, wrong=())


def test_a_former_clients_move_is_understood() -> None:
    assert msgspec.msgpack.decode(FORMER_MOVE, type=Move).chunks == (0, 1)
