# SPDX-License-Identifier: Apache-2.0
"""Who holds which slot: states, leases, slots, eviction. Pure: no clock, no device, no log."""
