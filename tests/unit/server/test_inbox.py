# SPDX-License-Identifier: Apache-2.0
"""Questions from other threads."""

import select
import threading

import pytest

from kvpool.model.errors import DeadlineExceeded, Draining
from kvpool.server.inbox import Inbox

JOIN_S = 5


@pytest.fixture
def inbox():
    box = Inbox()
    yield box
    box.close()


def serve_once(inbox):
    """Run what is posted next, as the loop would."""
    select.select([inbox], [], [], JOIN_S)
    for item in inbox.take():
        item()


def test_a_question_is_run_by_the_loop_and_its_result_returned(inbox):
    loop = threading.Thread(target=serve_once, args=(inbox,))
    loop.start()

    assert inbox.ask(threading.current_thread, JOIN_S) is loop
    loop.join(JOIN_S)


def test_what_a_question_raises_comes_back_to_its_asker(inbox):
    loop = threading.Thread(target=serve_once, args=(inbox,))
    loop.start()

    with pytest.raises(ZeroDivisionError):
        inbox.ask(lambda: 1 / 0, JOIN_S)
    loop.join(JOIN_S)


@pytest.mark.behaviour("D042")
def test_a_loop_that_stands_still_is_noticed(inbox):
    with pytest.raises(DeadlineExceeded):
        inbox.ask(lambda: None, 0.01)


def test_items_run_in_their_order(inbox):
    seen = []
    for n in range(3):
        inbox.post(lambda n=n: seen.append(n))
    serve_once(inbox)

    assert seen == [0, 1, 2]
    assert not select.select([inbox], [], [], 0)[0]


def test_the_end_refuses_waiting_and_later_questions(inbox):
    errors = []

    def ask():
        try:
            inbox.ask(lambda: None, JOIN_S)
        except Draining as e:
            errors.append(e)

    asker = threading.Thread(target=ask)
    asker.start()
    select.select([inbox], [], [], JOIN_S)
    inbox.shut()
    asker.join(JOIN_S)
    ask()

    assert len(errors) == 2


def test_posts_after_the_close_do_nothing(inbox):
    inbox.close()
    inbox.post(lambda: pytest.fail("ran"))
    inbox.close()
