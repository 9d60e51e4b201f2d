# SPDX-License-Identifier: Apache-2.0
"""Moving blocks between an engine's cache and a slot: planes, gather and scatter, each with its NumPy twin."""
