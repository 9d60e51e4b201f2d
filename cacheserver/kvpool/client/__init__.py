# SPDX-License-Identifier: Apache-2.0
"""Clients of a cache server: connection, transfers, worker and scheduler adapters."""
