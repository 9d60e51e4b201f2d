# SPDX-License-Identifier: Apache-2.0
"""What a bench run is asked to do."""

import argparse
from typing import Final

from msgspec import Struct

from kvpool.cli.errors import UsageError
from kvpool.cli.settings import size

__all__ = ["LEAST_RESTART_BYTES", "METADATA_ROUND", "Options", "options_of"]

LEAST_SHARD_BYTES: Final = 64
LEAST_RESTART_BYTES: Final = 16 << 20
METADATA_ROUND: Final = 512
"""Chunks of one request of the metadata cell."""


class Options(Struct, frozen=True, kw_only=True):
    """The options of `kvpool bench control`, checked."""

    tokens: int
    clients: int
    seconds: float
    shard_bytes: int
    restart_bytes: int
    metadata_chunks: int
    seed: int


def options_of(args: argparse.Namespace) -> Options:
    """Check the options.

    Raises:
        UsageError: a value is out of range; the text names the option and the remedy.
    """
    options = Options(
        tokens=args.tokens,
        clients=args.clients,
        seconds=args.seconds,
        shard_bytes=size("--shard-bytes", args.shard_bytes),
        restart_bytes=size("--restart-bytes", args.restart_bytes),
        metadata_chunks=args.metadata_chunks,
        seed=args.seed,
    )
    _at_least("--tokens", options.tokens, 1)
    _at_least("--clients", options.clients, 1)
    _at_least("--seconds", options.seconds, 0.01)
    _at_least("--seed", options.seed, 0)
    _at_least("--metadata-chunks", options.metadata_chunks, METADATA_ROUND)
    _at_least("--shard-bytes", options.shard_bytes, LEAST_SHARD_BYTES)
    _at_least("--restart-bytes", options.restart_bytes, LEAST_RESTART_BYTES)
    return options


def _at_least(option: str, value: float, least: float) -> None:
    if value < least:
        raise UsageError(f"{option}: {value:g} is too little; use at least {least:g}")
