# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: keys, layouts, identities, errors. Nothing here knows a device, a socket or a clock."""
