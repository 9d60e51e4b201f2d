# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: each ranks slots, and the index disposes."""
