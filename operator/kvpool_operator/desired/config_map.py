# SPDX-License-Identifier: Apache-2.0
"""The configuration files that servers and clients read, rendered through `kvpool.config`."""

import hashlib
from typing import Any, Final, Literal, cast

from kvpool import config
from kvpool._version import __version__
from kvpool.model.identity import Mode
from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.gpu import has_gpus
from kvpool_operator.spec.pool import IpcMode, Load, Pool

__all__ = [
    "ADMIN_FOLDER",
    "CONFIG_FOLDER",
    "KEY_FOLDER",
    "SERVERS",
    "SERVER_KEY",
    "SOCKET_FOLDER",
    "TOKEN_FILE",
    "all_servers",
    "client_config",
    "client_config_map",
    "config_hash",
    "mover_ports",
    "node_address",
    "server_config",
    "server_config_map",
    "serves_tcp",
]

CONFIG_FOLDER: Final = "/etc/kvpool"
KEY_FOLDER: Final = "/etc/kvpool-key"
SOCKET_FOLDER: Final = "/run/kvpool"
ADMIN_FOLDER: Final = "/run/kvpool-admin"
TOKEN_FILE: Final = "/var/run/secrets/kvpool.dev/token"  # noqa: S105 - a path
SERVER_KEY: Final = "server-key"
"""Entry of the clients' ConfigMap with the server's public key, and its file's name in an engine's pod."""
SERVERS: Final = "servers"
"""Entry of the servers' ConfigMap with the list of all of them, and its file's name wherever it is mounted."""
_ISSUER_KEYS: Final = "issuer.jwks"
_ANY_ADDRESS: Final = "*"
"""All of the pod's own, of both families; NetworkPolicy and tokens decide who enters."""
_OPEN_SOCKET: Final = 0o666
"""Engines run under any user id; the token is what proves them."""


def serves_tcp(pool: Pool) -> bool:
    """True unless the socket is the only door."""
    return pool.spec.network.auth != "None"


def server_config(pool: Pool, facts: Facts) -> config.ServerConfig:
    """What the pool's servers start with."""
    spec = pool.spec
    level = cast(Literal["debug", "info", "warning", "error"], spec.log_level.lower())
    return config.ServerConfig(
        written_for=__version__,
        pool_uid=pool.uid,
        living_pools=facts.node_pools if spec.l1.persistence == "Node" else None,
        servers_file=f"{CONFIG_FOLDER}/{SERVERS}" if serves_tcp(pool) else "",
        chunk_tokens=spec.chunk_tokens,
        listen=_listen(pool),
        auth=_auth(pool, facts),
        l1=config.L1Config(
            size_bytes=int(spec.l1.size),
            evict_above=spec.l1.high_watermark / 100,
            evict_to=spec.l1.low_watermark / 100,
            **_quotas(pool),
        ),
        http=config.HttpConfig(
            operations_host=_ANY_ADDRESS,
            operations_port=spec.network.operations_port,
            admin_socket=f"{ADMIN_FOLDER}/admin.sock",
        ),
        log=config.LogConfig(level=level),
        mover=_mover(pool),
        gpu=config.GpuConfig(required=True) if has_gpus(pool) else config.ServerConfig().gpu,
    )


def _quotas(pool: Pool) -> dict[str, Any]:
    shares = {q.tenant: q.l1_percent / 100 for q in pool.spec.tenants.quotas}
    return {"quotas": shares} if shares else {}


def mover_ports(pool: Pool) -> range:
    """TCP ports of a server's movers; none where no engine comes with a ring over TCP, which is never encrypted."""
    network = pool.spec.network
    if not serves_tcp(pool) or not has_gpus(pool) or network.encryption == "All":
        return range(0)
    return range(network.mover_ports.first, network.mover_ports.first + network.mover_ports.count)


def _mover(pool: Pool) -> config.MoverConfig:
    ports = mover_ports(pool)
    if ports:
        return config.MoverConfig(first_port=ports[0], ports=len(ports))
    over_tcp_alone = has_gpus(pool) and pool.spec.ipc.mode is not IpcMode.HOST_PATH_SOCKET
    return config.MoverConfig(ring=False) if over_tcp_alone else config.ServerConfig().mover


def _listen(pool: Pool) -> config.ListenConfig:
    network, token = pool.spec.network, serves_tcp(pool)
    socket = f"{SOCKET_FOLDER}/kvpool.sock" if pool.spec.ipc.mode is IpcMode.HOST_PATH_SOCKET else ""
    if not token:
        return config.ListenConfig(socket_path=socket)
    return config.ListenConfig(
        socket_path=socket,
        socket_mode=_OPEN_SOCKET,
        tcp_host=_ANY_ADDRESS,
        tcp_port=network.port,
        plain_bulk_port=network.bulk_port if network.encryption == "Control" else -1,
        curve_key_file=f"{KEY_FOLDER}/secret",
    )


def _auth(pool: Pool, facts: Facts) -> config.AuthConfig:
    tenants = pool.spec.tenants
    if not serves_tcp(pool):
        return config.AuthConfig(tenant=tenants.default)
    return config.AuthConfig(
        kind=config.AuthKind.TOKEN,
        issuers=(config.Issuer(issuer=facts.issuer, keys_file=f"{CONFIG_FOLDER}/{_ISSUER_KEYS}"),),
        audience=names.audience(pool),
        tenant=tenants.default,
        tenants={t.namespace: t.tenant for t in tenants.by_namespace},
        namespaces=tuple(sorted({pool.namespace, *pool.spec.clients.allowed_namespaces})),
    )


def node_address(pool: Pool) -> str:
    """Address that leads to the server of the caller's own node."""
    return f"tcp://{names.node_service(pool)}.{pool.namespace}.svc:{pool.spec.network.port}"


def all_servers(pool: Pool) -> str:
    """Address whose name lists all servers, whose ids are their nodes' names; empty where only the socket is a door."""
    if not serves_tcp(pool):
        return ""
    return f"tcp://{names.servers_service(pool)}.{pool.namespace}.svc:{pool.spec.network.port}"


def client_config(pool: Pool, server_key: str, *, socket: bool | None = None) -> config.ClientConfig:
    """What clients of the pool start with; wiring adds what differs from pod to pod.

    Args:
        pool: the pool.
        server_key: public half of its CURVE key.
        socket: False for clients that cannot have the socket although the pool has one.
    """
    if socket is None:
        socket = pool.spec.ipc.mode is IpcMode.HOST_PATH_SOCKET
    modes: dict[str, Any] = {"Streamed": {"modes": (Mode.STREAMED,)}, "Ring": {"modes": (Mode.RING,)}}
    if socket:
        modes["ClientMoved"] = {"modes": (Mode.CLIENT_MOVED,)}
    return config.ClientConfig(
        written_for=__version__,
        server=f"ipc://{SOCKET_FOLDER}/kvpool.sock" if socket else node_address(pool),
        server_key=server_key if serves_tcp(pool) else "",
        token_file=TOKEN_FILE if serves_tcp(pool) else "",
        all_servers=all_servers(pool),
        store_generated=pool.spec.store.generated_tokens,
        store_min_tokens=pool.spec.store.min_tokens,
        load_min_tokens=pool.spec.load.min_tokens,
        **_load_budget(pool),
        **modes.get(pool.spec.transfer.mode, {}),
    )


def _load_budget(pool: Pool) -> dict[str, Any]:
    """Nothing where it is as clients have it by themselves."""
    percent = pool.spec.load.time_budget
    return {} if percent == Load().time_budget else {"load_budget": percent / 100}


def config_hash(pool: Pool, facts: Facts) -> str:
    """Changes when servers must start anew: not for what they follow while they run, such as the issuer's keys."""
    stable = config.without_live(server_config(pool, facts))
    return hashlib.sha256(config.render(stable)).hexdigest()[:16]


def server_config_map(pool: Pool, facts: Facts) -> dict[str, Any]:
    """The ConfigMap that servers mount."""
    data = {"server.json": config.render(server_config(pool, facts)).decode()}
    if serves_tcp(pool):
        data[_ISSUER_KEYS] = facts.issuer_keys
        data[SERVERS] = facts.servers
    return _config_map(pool, names.server_config(pool), data)


def client_config_map(pool: Pool, facts: Facts) -> dict[str, Any]:
    """The ConfigMap that wiring reads; it also remembers the public key, whose Secret is never read."""
    data = {"client.json": config.render(client_config(pool, facts.server_key)).decode()}
    if serves_tcp(pool):
        data[SERVER_KEY] = facts.server_key
    made = _config_map(pool, names.client_config(pool), data)
    if serves_tcp(pool):
        made["metadata"]["annotations"] = {names.SERVER_KEY: facts.server_key}
    return made


def _config_map(pool: Pool, name: str, data: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": names.metadata(pool, name), "data": data}
