# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics, its exporter and its generators."""
