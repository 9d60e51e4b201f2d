# SPDX-License-Identifier: Apache-2.0
"""kvpool: a node-local KV cache server for vLLM, its clients and its connector."""

from kvpool._version import __version__

__all__ = ["__version__"]
