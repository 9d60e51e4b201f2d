# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector: a thin facade over plain state machines."""
