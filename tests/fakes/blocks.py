# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - a port's signatures
"""A paged cache as one NumPy array: the client's BlockPort without an engine."""

import threading

import numpy as np

POISON = 0xA5


class NumpyBlocks:
    """``blocks`` blocks of ``block_bytes``; a test may hold gathers and scatters at ``gate``."""

    locks = None

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.memory = np.full((blocks, block_bytes), POISON, dtype=np.uint8)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.gathered = 0
        self.scattered = 0

    def fill(self, seed: int) -> None:
        """Give every block its own random bytes."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, dtype=np.uint8)

    def gather(self, group, block_ids, out) -> None:
        self.pass_gate(block_ids)
        target = np.frombuffer(out, dtype=np.uint8).reshape(len(block_ids), -1)
        # Not mode "raise", which copies through a buffer; the range was checked.
        np.take(self.memory, block_ids, axis=0, out=target, mode="clip")
        self.gathered += 1

    def scatter(self, group, block_ids, skip_blocks, data) -> None:
        self.pass_gate(block_ids)
        source = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), -1)
        self.memory[block_ids[skip_blocks:]] = source[skip_blocks:]
        self.scattered += 1

    def pass_gate(self, block_ids) -> None:
        """Wait at the gate; refuse blocks that do not exist."""
        self.entered.set()
        assert self.gate.wait(30)
        if (block_ids >= len(self.memory)).any():
            raise IndexError(f"block {block_ids.max()} of {len(self.memory)}")


class StagedNumpyBlocks(NumpyBlocks):
    """Blocks that a device's stage moves; gates and counts are those of its base."""

    staged = None
    """A ``StagedBlocks`` over the same memory."""

    @property
    def locks(self):
        return self.staged.locks

    def gather(self, group, block_ids, out) -> None:
        self.pass_gate(block_ids)
        self.staged.gather(group, block_ids, out)
        self.gathered += 1

    def scatter(self, group, block_ids, skip_blocks, data) -> None:
        self.pass_gate(block_ids)
        self.staged.scatter(group, block_ids, skip_blocks, data)
        self.scattered += 1
