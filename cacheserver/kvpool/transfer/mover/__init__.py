# SPDX-License-Identifier: Apache-2.0
"""The mover: one process for each GPU client, between that client's ring and the arena; and who watches over it."""
