# SPDX-License-Identifier: Apache-2.0
"""What every process of the operator starts with: log lines as JSON, and a client of the API that has logged in."""

import json
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

__all__ = ["api_client", "log_as_json"]


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({"time": self.formatTime(record), **line})


def log_as_json() -> None:
    """Write log lines as JSON to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it has a line for each event


@asynccontextmanager
async def api_client() -> AsyncIterator[ApiClient]:
    """A client that is logged in by a kubeconfig where there is one, else as the pod's service account."""
    configuration = Configuration()
    load: Any = config.load_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "using in-cluster config": as meant, in a pod
        await load(client_configuration=configuration)
    async with ApiClient(configuration) as api:
        yield api
