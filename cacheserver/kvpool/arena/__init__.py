# SPDX-License-Identifier: Apache-2.0
"""The L1 memory: shared memory segments, slot headers, recovery."""
