# SPDX-License-Identifier: Apache-2.0
"""Eviction policies behind one interface."""
