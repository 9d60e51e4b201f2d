# SPDX-License-Identifier: Apache-2.0
"""The one place that knows the version of the distribution."""

__version__ = "0.1.0"
