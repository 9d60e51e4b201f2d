# SPDX-License-Identifier: Apache-2.0
"""What one worker tells the scheduler of its cache, and whether the facts of all workers fit each other."""

from collections.abc import Sequence

from kvpool.connector.plan import GroupFacts, WorkerFacts
from kvpool.connector.translate import EngineFacts
from kvpool.transfer.planes import Layout, LayoutError, PagedTensor, layout_of

__all__ = ["describe_worker", "disagreement", "layouts_of"]


def layouts_of(engine: EngineFacts, tensors: Sequence[PagedTensor]) -> list[Layout]:
    """Cut the engine's tensors into the layouts of its groups.

    Raises:
        LayoutError: a tensor does not fit, or is in no group's memory.
    """
    named = {tensor.name: tensor for tensor in tensors}
    layouts = [layout_of([named.pop(n) for n in g.layers], engine.blocks, g.block_tokens) for g in engine.groups]
    known = {(p.storage, p.offset, p.stride) for layout in layouts for p in layout.planes}
    # Layers that use another one's memory are in no group.
    for tensor in named.values():
        for plane in layout_of([tensor], engine.blocks, 1).planes:
            if (plane.storage, plane.offset, plane.stride) not in known:
                raise LayoutError(f"{tensor.name} is in none of the engine's cache groups")
    return layouts


def describe_worker(engine: EngineFacts, layouts: Sequence[Layout], node: str, server: str) -> WorkerFacts:
    """Return what a worker tells the scheduler."""
    return WorkerFacts(
        namespace=engine.namespace,
        groups=tuple(
            GroupFacts(
                planes=layout.specs(),
                block_tokens=group.block_tokens,
                kind=group.kind,
                window_tokens=group.window_tokens,
                number=group.number,
            )
            for group, layout in zip(engine.groups, layouts, strict=True)
        ),
        hash_tokens=engine.hash_tokens,
        stage=engine.strategy.stage,
        stages=engine.strategy.pipeline,
        shard=engine.strategy.shard,
        readers=engine.strategy.readers,
        writer=engine.strategy.writer,
        node=node,
        server=server,
    )


def disagreement(workers: Sequence[WorkerFacts]) -> str:
    """Say why these workers cannot be cached together; empty if they can."""
    if not workers:
        return "no worker said what it caches"
    for facts in workers:
        if facts.refusal:
            return facts.refusal
    stages = {facts.stage for facts in workers}
    if stages != set(range(workers[0].stages)):
        return f"{workers[0].stages} pipeline stages are expected, and {sorted(stages)} have a worker"
    kinds = {(g.number, g.kind, g.window_tokens, g.block_tokens) for facts in workers for g in facts.groups}
    if len(kinds) > len({number for number, *_ in kinds}):
        return "the ranks' caches differ in the kinds of their groups"
    return next(filter(None, (_stage_disagreement([f for f in workers if f.stage == s]) for s in sorted(stages))), "")


def _stage_disagreement(workers: Sequence[WorkerFacts]) -> str:
    first = workers[0]
    if any((f.namespace, f.groups) != (first.namespace, first.groups) for f in workers):
        return "the ranks' caches differ in layout or model"
    assert first.namespace is not None
    if {f.shard for f in workers} != set(range(first.namespace.shard_count)):
        return (
            f"{first.namespace.shard_count} shards are expected, and {sorted({f.shard for f in workers})} have a worker"
        )
    return ""
