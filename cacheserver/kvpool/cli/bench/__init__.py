# SPDX-License-Identifier: Apache-2.0
"""`kvpool bench`: numbers whose bytes were compared."""
