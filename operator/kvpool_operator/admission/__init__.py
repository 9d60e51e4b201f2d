# SPDX-License-Identifier: Apache-2.0
"""The admission server: a process of its own that wires pods as they are created. It decides nothing by itself."""

from kvpool_operator.admission.settings import WebhookSettings

__all__ = ["WebhookSettings"]
