# SPDX-License-Identifier: Apache-2.0
"""Which part of the cache each rank holds, stores and reads, in every layout; and what is refused."""

from collections import Counter
from itertools import product

import pytest

from kvpool.connector.strategy import NotParallel, ParallelStrategy


def ranks(**layout):
    world = layout.get("tensor", 1) * layout.get("pipeline", 1)
    return [ParallelStrategy(rank=rank, **layout) for rank in range(world)]


@pytest.mark.behaviour("R001", "R110", "R118", "R119", "D018", "D072")
@pytest.mark.parametrize(
    ("layout", "places"),
    [
        # (stage, shard, readers on the node, writer) of each rank
        ({}, [(0, 0, 1, True)]),
        ({"tensor": 2}, [(0, 0, 1, True), (0, 1, 1, True)]),
        ({"tensor": 2, "nodes": 2}, [(0, 0, 1, True), (0, 1, 1, True)]),
        ({"tensor": 4, "replicas": 4}, [(0, 0, 4, True)] + [(0, 0, 4, False)] * 3),
        ({"tensor": 4, "replicas": 2}, [(0, 0, 2, True), (0, 0, 2, False), (0, 1, 2, True), (0, 1, 2, False)]),
        ({"tensor": 4, "replicas": 4, "nodes": 2}, [(0, 0, 2, True), (0, 0, 2, False)] * 2),
        ({"tensor": 4, "replicas": 4, "nodes": 4}, [(0, 0, 1, True)] * 4),
        ({"pipeline": 2}, [(0, 0, 1, True), (1, 0, 1, True)]),
        ({"pipeline": 2, "nodes": 2}, [(0, 0, 1, True), (1, 0, 1, True)]),
        (
            {"tensor": 2, "pipeline": 2, "replicas": 2, "nodes": 2},
            [(0, 0, 2, True), (0, 0, 2, False), (1, 0, 2, True), (1, 0, 2, False)],
        ),
        ({"tensor": 2, "decode_context": 2}, [(0, 0, 1, True), (0, 1, 1, True)]),
    ],
)
def test_places(layout, places) -> None:
    assert [(r.stage, r.shard, r.readers, r.writer) for r in ranks(**layout)] == places


def layouts():
    for tensor, pipeline, nodes in product((1, 2, 3, 4, 6, 8, 16), (1, 2, 4), (1, 2, 3, 4, 8)):
        for replicas in (n for n in range(1, tensor + 1) if not tensor % n):
            if not tensor * pipeline % nodes:
                yield {"tensor": tensor, "pipeline": pipeline, "nodes": nodes, "replicas": replicas}


@pytest.mark.behaviour("D073")
@pytest.mark.parametrize("layout", list(layouts()), ids=str)
def test_each_part_has_one_writer_on_each_node_that_reads_it(layout) -> None:
    everyone = ranks(**layout)
    local = everyone[0].world // layout["nodes"]

    at = Counter((r.rank // local, r.stage, r.shard) for r in everyone)
    writers = Counter((r.rank // local, r.stage, r.shard) for r in everyone if r.writer)

    assert all(writers[place] == 1 for place in at)
    assert all(r.readers == at[r.rank // local, r.stage, r.shard] for r in everyone)
    parts = {(r.stage, r.shard) for r in everyone}
    assert parts == set(product(range(layout["pipeline"]), range(everyone[0].shard_count)))


@pytest.mark.behaviour("D073")
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"prefill_context": 2}, "prefill context parallelism .here 2."),
        ({"launcher": "external_launcher"}, "external launcher"),
        ({"tensor": 4, "replicas": 3}, "4 tensor parallel ranks cannot hold 3 copies"),
        ({"tensor": 4, "decode_context": 3}, "context parallel groups of 3"),
        ({"tensor": 3, "nodes": 2}, "3 ranks on 2 nodes"),
        ({"tensor": 2, "nodes": 4}, "2 ranks on 4 nodes"),
        ({"rank": 2, "tensor": 2}, "rank 2 is none of the 2 ranks"),
        ({"tensor": 0}, "tensor parallel size of 0"),
        ({"nodes": 0}, "nodes of 0"),
    ],
)
def test_what_is_refused_names_the_reason(layout, words) -> None:
    with pytest.raises(NotParallel, match=words):
        ParallelStrategy(**layout)


def test_layouts_that_must_not_share_have_other_texts() -> None:
    texts = [
        ParallelStrategy(**layout).text
        for layout in (
            {},
            {"tensor": 2},
            {"pipeline": 2},
            {"pipeline": 2, "rank": 1},
            {"tensor": 2, "decode_context": 2},
            {"tensor": 2, "decode_context": 2, "interleave_tokens": 16},
        )
    ]

    assert len(set(texts)) == len(texts)
    assert ParallelStrategy(tensor=2, nodes=2).text == ParallelStrategy(tensor=2).text, "where ranks run is no matter"
