# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.deadlines import Deadlines

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
    ),
    max_size=300,
)


@given(STEPS)
def test_behaves_as_a_dictionary_of_due_times(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for step, key, time_s in steps:
        if step == "set":
            deadlines.set(key, time_s)
            model[key] = time_s
        elif step == "drop":
            deadlines.drop(key)
            model.pop(key, None)
        else:
            due = deadlines.pop_due(time_s)
            assert sorted(due) == sorted(k for k, t in model.items() if t <= time_s)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            model = {k: t for k, t in model.items() if t > time_s}
        assert deadlines.next_s() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_moving_a_deadline_for_ever_takes_no_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()

    for time_s in range(10_000):
        deadlines.set("key", float(time_s))

    assert len(deadlines._heap) < 100
    assert deadlines.next_s() == 9999
