# SPDX-License-Identifier: Apache-2.0
"""The command line: server, status, doctor, bench, keys."""
