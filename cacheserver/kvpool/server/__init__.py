# SPDX-License-Identifier: Apache-2.0
"""The composition root of a cache server: loop, dispatch, lanes, identity, HTTP, drain."""
