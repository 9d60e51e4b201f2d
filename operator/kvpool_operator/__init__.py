# SPDX-License-Identifier: Apache-2.0
"""The operator: turns KVCachePools into cache servers and keeps them so."""
