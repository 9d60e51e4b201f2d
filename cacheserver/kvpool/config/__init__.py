# SPDX-License-Identifier: Apache-2.0
"""ServerConfig and ClientConfig, declared once; the operator renders them, server and client read them.

A value comes from the JSON file, and a variable of the environment overrides it: its name is the prefix and the field's
path (``l1.size_bytes`` is ``KVPOOL_SERVER__L1__SIZE_BYTES``; two underscores, because Kubernetes puts
``KVPOOL_SERVER_PORT`` and the like into every pod beside a Service of that name). In the environment byte sizes may
have a suffix (``8GiB``, ``512Mi``); nothing further in knows that a size was ever text.
"""

from kvpool.config.fields import (
    AuthConfig,
    AuthKind,
    ClientConfig,
    GpuConfig,
    HttpConfig,
    Issuer,
    L1Config,
    LeaseConfig,
    LimitConfig,
    ListenConfig,
    LogConfig,
    MoverConfig,
    Section,
    ServerConfig,
)
from kvpool.config.live import LIVE_FIELDS, live_digest, restart_fields, without_live
from kvpool.config.reading import (
    CLIENT_ENV_PREFIX,
    SERVER_ENV_PREFIX,
    ConfigError,
    decode_client,
    decode_server,
    leaf_fields,
    parse_bytes,
    render,
)

__all__ = [
    "CLIENT_ENV_PREFIX",
    "LIVE_FIELDS",
    "SERVER_ENV_PREFIX",
    "AuthConfig",
    "AuthKind",
    "ClientConfig",
    "ConfigError",
    "GpuConfig",
    "HttpConfig",
    "Issuer",
    "L1Config",
    "LeaseConfig",
    "LimitConfig",
    "ListenConfig",
    "LogConfig",
    "MoverConfig",
    "Section",
    "ServerConfig",
    "decode_client",
    "decode_server",
    "leaf_fields",
    "live_digest",
    "parse_bytes",
    "render",
    "restart_fields",
    "without_live",
]
