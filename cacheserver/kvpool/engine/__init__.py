# SPDX-License-Identifier: Apache-2.0
"""The verbs of a cache server: register, lookup, store, retrieve, release. It reaches the rim through ports."""
