# SPDX-License-Identifier: Apache-2.0
"""How an engine's ranks share out the cache: which part each holds, who stores it, who reads it. Pure numbers.

    stages      pipeline stages hold different layers: each has a namespace of its own, and a hit is one in all of them
    shards      the ranks of one stage split each chunk (tensor parallel, and context parallel where the engine shards
                its cache over ranks), or hold copies of one part (MLA, fewer key heads than ranks)
    data        replicas of the engine have schedulers of their own and share everything

Ranks are numbered as the engine does it: stage by stage, tensor parallel ranks within. A node's ranks use its server;
of those that hold the same part the first one stores it. Nothing is divided that does not come out even, and what is
not supported is refused by name at the engine's start.
"""

from dataclasses import dataclass

__all__ = ["NotParallel", "ParallelStrategy"]


class NotParallel(ValueError):
    """This combination of parallel layouts is not supported; the text names it and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStrategy:
    """One rank's place.

    Raises:
        NotParallel: see there.
    """

    rank: int = 0
    """In its replica of the engine."""

    tensor: int = 1
    pipeline: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    interleave_tokens: int = 1
    """Tokens that one rank of a context parallel group keeps before the next one's turn."""

    replicas: int = 1
    """Consecutive tensor parallel ranks that hold the same."""

    nodes: int = 1
    """Nodes of one replica."""

    launcher: str = ""
    """The engine's executor."""

    def __post_init__(self) -> None:
        for what, value in (
            ("tensor parallel size", self.tensor),
            ("pipeline parallel size", self.pipeline),
            ("decode context parallel size", self.decode_context),
            ("number of ranks that hold the same", self.replicas),
            ("number of nodes", self.nodes),
        ):
            if value < 1:
                raise NotParallel(f"a {what} of {value} makes no sense")
        if self.prefill_context > 1:
            raise NotParallel(
                f"prefill context parallelism (here {self.prefill_context}) is not supported: its ranks share out a "
                "prompt's tokens in an order that no chunk follows"
            )
        if self.launcher == "external_launcher":
            raise NotParallel(
                "the external launcher is not supported: each of its ranks has a scheduler that cannot see the others"
            )
        if self.tensor % self.replicas:
            raise NotParallel(f"{self.tensor} tensor parallel ranks cannot hold {self.replicas} copies of each part")
        if self.tensor % self.decode_context:
            raise NotParallel(
                f"{self.tensor} tensor parallel ranks cannot be split into context parallel groups of "
                f"{self.decode_context}"
            )
        if self.world % self.nodes:
            raise NotParallel(f"{self.world} ranks on {self.nodes} nodes: each node must have as many as the others")
        if not 0 <= self.rank < self.world:
            raise NotParallel(f"rank {self.rank} is none of the {self.world} ranks of the engine")

    @property
    def world(self) -> int:
        """Ranks of one replica of the engine."""
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // self.tensor

    @property
    def shard(self) -> int:
        """This rank's part of each chunk of its stage."""
        return self.rank % self.tensor // self.replicas

    @property
    def shard_count(self) -> int:
        """Parts that a stage's chunks are split into."""
        return self.tensor // self.replicas

    @property
    def readers(self) -> int:
        """Ranks of this node that hold the same part, this one among them."""
        return len(self._beside())

    @property
    def writer(self) -> bool:
        """True if this rank stores for those of its node that hold the same part."""
        return self.rank == self._beside()[0]

    @property
    def text(self) -> str:
        """The layout as part of a namespace: engines that differ in it never share chunks."""
        parts = [f"tp{self.tensor}"]
        if self.pipeline > 1:
            parts.append(f"pp{self.pipeline}.{self.stage}")
        if self.decode_context > 1:
            parts.append(f"dcp{self.decode_context}.{self.interleave_tokens}")
        return " ".join(parts)

    def _beside(self) -> range:
        """Ranks of this node that hold this rank's part."""
        first = self.rank - self.rank % self.tensor % self.replicas
        local = self.world // self.nodes
        node = self.rank // local
        return range(max(first, node * local), min(first + self.replicas, (node + 1) * local))
