# SPDX-License-Identifier: Apache-2.0
"""The protocol: typed messages, versions, frames and their codec."""
