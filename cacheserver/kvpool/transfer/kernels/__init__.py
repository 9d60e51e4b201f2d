# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter in device memory, inside the engine's process. Their specification is ``transfer.reference``."""
