# SPDX-License-Identifier: Apache-2.0
"""`kvpool doctor`: facts of the machine, checks over them, a report."""
