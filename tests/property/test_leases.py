# SPDX-License-Identifier: Apache-2.0
"""Leases against a plain dictionary, for any sequence of calls."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvpool.index.leases import Leases

IDS = st.sampled_from([bytes([n]) for n in range(5)])
CLIENTS = st.sampled_from([b"a", b"b"])
TIMES = st.integers(0, 30)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDS, CLIENTS, TIMES),
        st.tuples(st.just("renew"), IDS, CLIENTS, TIMES),
        st.tuples(st.just("pop"), IDS, CLIENTS, TIMES),
        st.tuples(st.just("due"), IDS, CLIENTS, TIMES),
    ),
    max_size=60,
)


@dataclass(eq=False)
class Lease:
    client_id: bytes
    began_s: float


@given(STEPS)
def test_leases_are_found_by_id_by_client_and_by_deadline(steps: list[tuple[str, bytes, bytes, int]]) -> None:
    leases: Leases[Lease] = Leases()
    model: dict[bytes, tuple[Lease, int]] = {}
    for at, (step, lease_id, client_id, time_s) in enumerate(steps):
        if step == "add" and lease_id not in model:
            model[lease_id] = (Lease(client_id, at), time_s)
            leases.add(lease_id, model[lease_id][0], time_s)
        elif step == "renew" and lease_id in model:
            model[lease_id] = (model[lease_id][0], time_s)
            leases.renew(lease_id, time_s)
        elif step == "pop":
            assert leases.pop(lease_id) is model.pop(lease_id, (None, 0))[0]
        elif step == "due":
            due = leases.due(time_s)
            assert sorted(due) == sorted(key for key, (_, due_s) in model.items() if due_s <= time_s)
            for key in due:
                assert leases.pop(key) is model.pop(key)[0]
        check(leases, model)


def check(leases: Leases[Lease], model: dict[bytes, tuple[Lease, int]]) -> None:
    assert list(leases) == [lease for lease, _ in model.values()]
    assert len(leases) == len(model)
    assert leases.next_s() == min((due_s for _, due_s in model.values()), default=None)
    assert leases.oldest_s() == min((lease.began_s for lease, _ in model.values()), default=None)
    for client_id in (b"a", b"b"):
        assert leases.of_client(client_id) == [k for k, (lease, _) in model.items() if lease.client_id == client_id]
