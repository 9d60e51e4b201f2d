# SPDX-License-Identifier: Apache-2.0
"""The sections and fields of both configurations: types, units, ranges, defaults, descriptions."""

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvpool.model.identity import Mode, Role

__all__ = [
    "AuthConfig",
    "AuthKind",
    "ClientConfig",
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
]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all sections: unknown fields are refused, defaults are not rendered."""


class AuthKind(StrEnum):
    """How a client proves who it is."""

    NONE = "none"
    SECRET = "secret"  # noqa: S105 (a kind, not a secret)
    TOKEN = "token"  # noqa: S105


class Issuer(Section, frozen=True, kw_only=True):
    """One issuer of tokens that the server trusts."""

    issuer: Annotated[str, Meta(min_length=1, description="The token's `iss` claim.")]
    keys_file: Annotated[str, Meta(min_length=1, description="JSON Web Key Set with the issuer's public keys.")]


class AuthConfig(Section, frozen=True, kw_only=True):
    """Identity at Hello."""

    kind: Annotated[
        AuthKind, Meta(description="none (private Unix socket alone), secret (shared secret file) or token.")
    ] = AuthKind.NONE
    secret_file: Annotated[str, Meta(description="File with the shared secret; needed when kind is secret.")] = ""
    issuers: Annotated[tuple[Issuer, ...], Meta(description="Trusted issuers; needed when kind is token.")] = ()
    audience: Annotated[str, Meta(description="Audience that tokens must name; needed when kind is token.")] = ""
    tenant: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=128,
            description="Tenant of clients that show no namespace in a token.",
        ),
    ] = "default"
    tenants: Annotated[
        dict[str, str], Meta(description="Namespace to tenant, where a namespace is not its own tenant.")
    ] = {}
    namespaces: Annotated[
        tuple[str, ...], Meta(description="Namespaces whose pods are admitted; empty admits all.")
    ] = ()
    leeway_s: Annotated[float, Meta(ge=0, le=300, description="Clock difference allowed when a token is checked.")] = (
        30.0
    )


class ListenConfig(Section, frozen=True, kw_only=True):
    """Where clients connect."""

    socket_path: Annotated[
        str,
        Meta(
            description="Unix socket for clients of this node; empty for none. Beside it, NAME.fd hands out segments."
        ),
    ] = "/run/kvpool/kvpool.sock"
    socket_mode: Annotated[int, Meta(ge=0, le=0o777, description="Permission bits of the sockets.")] = 0o660
    tcp_host: Annotated[str, Meta(description="Address for TCP clients; * for all of both families; empty: none.")] = ""
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="TCP port, CURVE-encrypted; 0 takes a free one.")] = 7410
    plain_bulk_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="TCP port for bulk connections without encryption; -1 for none, 0 takes a free one.",
        ),
    ] = -1
    curve_key_file: Annotated[
        str, Meta(description="File with the server's CURVE secret key (Z85, 40 characters); needed with tcp_host.")
    ] = ""


class L1Config(Section, frozen=True, kw_only=True):
    """The host memory that keeps chunks."""

    size_bytes: Annotated[int, Meta(ge=16 * MIB, le=64 << 40, description="Bytes of the arena, exact.")] = 1 * GIB
    max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=64 << 40,
            description="Most that size_bytes may be set to while the server runs; a larger one is cut to it. 0: as "
            "size_bytes is at the start.",
        ),
    ] = 0
    directory: Annotated[str, Meta(min_length=1, description="Folder on a tmpfs that holds the segments.")] = (
        "/dev/shm/kvpool"  # noqa: S108
    )
    segment_bytes: Annotated[
        int, Meta(ge=0, le=16 * GIB, description="Bytes of one segment; 0 chooses between 4 MiB and 1 GiB by size.")
    ] = 0
    allow_disk: Annotated[
        bool, Meta(description="Accept a folder that is not on a tmpfs (slow; for tests and experiments).")
    ] = False
    persist: Annotated[bool, Meta(description="Keep the segments at exit so that the next server serves them.")] = True
    evict_above: Annotated[
        float, Meta(gt=0, le=1, description="Share of slots in use above which the background evicts.")
    ] = 0.97
    evict_to: Annotated[
        float, Meta(gt=0, le=1, description="Share of slots in use that the background evicts down to.")
    ] = 0.94
    quotas: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1)]],
        Meta(description="Tenant to the share of L1 that it has for itself; all others share the rest."),
    ] = {}
    policy: Annotated[Literal["lru"], Meta(description="Eviction policy.")] = "lru"
    verify_loads: Annotated[float, Meta(ge=0, le=1, description="Share of loads whose checksums are verified.")] = 0.01


class LeaseConfig(Section, frozen=True, kw_only=True):
    """How long claims last."""

    lookup_s: Annotated[float, Meta(gt=0, le=3600, description="A lookup's pins, unless freed before.")] = 60.0
    store_s: Annotated[float, Meta(gt=0, le=3600, description="From PrepareStore to CommitStore.")] = 60.0
    session_idle_s: Annotated[
        float, Meta(gt=0, le=86400, description="A request without any call is forgotten after this.")
    ] = 600.0
    tombstone_s: Annotated[
        float, Meta(gt=0, le=3600, description="How long an end is remembered for calls that it overtook.")
    ] = 60.0
    heartbeat_s: Annotated[float, Meta(gt=0, le=60, description="Interval of a client's pings.")] = 1.0
    client_silent_s: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="A TCP client silent for this long is taken for dead (never one with a living process handle).",
        ),
    ] = 4.0


class LimitConfig(Section, frozen=True, kw_only=True):
    """Limits on everything; over one of them a request gets a typed refusal."""

    frame_bytes: Annotated[int, Meta(ge=64 * KIB, le=64 * MIB, description="Largest frame.")] = 4 * MIB
    chunks: Annotated[int, Meta(ge=1, le=65536, description="Chunks of one request.")] = 8192
    clients: Annotated[int, Meta(ge=1, le=65536, description="Clients at a time.")] = 1024
    in_flight: Annotated[int, Meta(ge=1, le=65536, description="Unanswered requests of one client.")] = 256
    sessions: Annotated[int, Meta(ge=1, le=1 << 20, description="Live requests, all clients together.")] = 65536
    leases: Annotated[int, Meta(ge=1, le=1 << 20, description="Live lookups and stores, all clients together.")] = 65536
    namespaces: Annotated[int, Meta(ge=1, le=65536, description="Namespaces known at a time.")] = 4096
    bulk_window: Annotated[int, Meta(ge=1, le=64, description="Bulk frames of one client under way (credits).")] = 4
    pinned_share: Annotated[float, Meta(gt=0, le=1, description="Share of L1 that lookups may pin together.")] = 0.5
    pinned_client_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of L1 that one client's lookups may pin.")
    ] = 0.25
    lanes: Annotated[int, Meta(ge=1, le=64, description="Threads that copy streamed bytes.")] = 2


class HttpConfig(Section, frozen=True, kw_only=True):
    """The two HTTP faces."""

    operations_host: Annotated[
        str, Meta(description="Address of live, ready, metrics, status; * is all, empty none.")
    ] = "127.0.0.1"
    operations_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the operations face; 0 takes a free one.")
    ] = 7411
    admin_socket: Annotated[str, Meta(description="Unix socket of the admin face, mode 0600; empty for none.")] = ""
    live_s: Annotated[float, Meta(gt=0, le=60, description="The request loop must answer within this to be live.")] = (
        2.0
    )


class GpuConfig(Section, frozen=True, kw_only=True):
    """The node's GPUs, as far as they decide whether the server is ready."""

    required: Annotated[
        bool, Meta(description="Not ready while no GPU is visible; clients that are connected are served all the same.")
    ] = False
    look_s: Annotated[float, Meta(gt=0, le=600, description="Time between two looks at the devices.")] = 10.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Structured logs on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level written.")] = "info"
    format: Annotated[Literal["json", "text"], Meta(description="One JSON object a line, or text for people.")] = "json"


class MoverConfig(Section, frozen=True, kw_only=True):
    """Movers: processes between the rings of GPU clients and L1."""

    ring: Annotated[bool, Meta(description="Offer modes ring and mapped to clients.")] = True
    first_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="First TCP port of the movers of TCP clients; 0 lets each take a free one."),
    ] = 0
    ports: Annotated[int, Meta(ge=1, le=1024, description="How many such ports there are.")] = 64
    checksums: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of the chunks stored through rings whose checksum the mover makes."),
    ] = 0.05
    start_s: Annotated[float, Meta(gt=0, le=600, description="A mover that is not ready after this is ended.")] = 20.0
    revoke_s: Annotated[
        float, Meta(gt=0, le=60, description="A mover that still copies this long after a lease ended is ended.")
    ] = 5.0


class ServerConfig(Section, frozen=True, kw_only=True):
    """What a cache server needs to start; its JSON is what the operator mounts."""

    written_for: Annotated[
        str, Meta(description="Version of kvpool that wrote this file; named when a field is unknown here.")
    ] = ""
    pool_uid: Annotated[
        str, Meta(pattern="^[A-Za-z0-9-]{1,64}$", description="Uid of the pool; part of the segments' names.")
    ] = "local"
    living_pools: Annotated[
        tuple[str, ...] | None,
        Meta(description="Uids of all pools that exist: segments of others are swept. Not given: none is swept."),
    ] = None
    server_id: Annotated[
        str, Meta(max_length=253, description="Name of this server, for people; empty is the host's name.")
    ] = ""
    servers_file: Annotated[
        str,
        Meta(
            description="List of the pool's servers, one `tcp://host:port#ID` a line, for clients that ask where one "
            "is; read for each question. Empty: such clients look elsewhere."
        ),
    ] = ""
    chunk_tokens: Annotated[int, Meta(ge=1, le=65536, description="Tokens of one chunk.")] = 256
    drain_s: Annotated[float, Meta(gt=0, le=60, description="Time for work under way after SIGTERM.")] = 4.0
    listen: ListenConfig = ListenConfig()
    auth: AuthConfig = AuthConfig()
    l1: L1Config = L1Config()
    leases: LeaseConfig = LeaseConfig()
    limits: LimitConfig = LimitConfig()
    mover: MoverConfig = MoverConfig()
    http: HttpConfig = HttpConfig()
    gpu: GpuConfig = GpuConfig()
    log: LogConfig = LogConfig()


class ClientConfig(Section, frozen=True, kw_only=True):
    """What an engine needs to reach the server of its node; the connector's extra config and the environment."""

    written_for: Annotated[
        str, Meta(description="Version of kvpool that wrote this; named when a field is unknown here.")
    ] = ""
    server: Annotated[
        str,
        Meta(
            pattern="^(ipc://.+|tcp://.+:[0-9]+(#.+)?)$",
            description="Address: ipc:///path, tcp://host:port, or tcp://host:port#ID for the server of that id among "
            "all that the host's name lists.",
        ),
    ] = "ipc:///run/kvpool/kvpool.sock"
    all_servers: Annotated[
        str,
        Meta(
            pattern="^(tcp://.+:[0-9]+)?$",
            description="tcp://host:port of a name that lists all servers of the pool, whose ids are their nodes' "
            "names: how a scheduler reaches those of its ranks on other nodes.",
        ),
    ] = ""
    servers_file: Annotated[
        str,
        Meta(
            description="File with a list of all servers, one `tcp://host:port#ID` a line, read at each connection to "
            "another node's server that could not be found before: it may be missing, and may change."
        ),
    ] = ""
    servers: Annotated[
        tuple[Annotated[str, Meta(pattern="^tcp://.+:[0-9]+(#.+)?$")], ...],
        Meta(
            description="The same list in the configuration itself, asked last. The id may be left out: each server is "
            "asked who it is."
        ),
    ] = ()
    server_key: Annotated[str, Meta(description="The server's public CURVE key (Z85); needed with tcp.")] = ""
    server_key_file: Annotated[
        str, Meta(description="File with the same key, read at each connection; it may be written later.")
    ] = ""
    secret_file: Annotated[str, Meta(description="File with the shared secret.")] = ""
    token_file: Annotated[
        str, Meta(description="File with the pod's projected token; read again when it is renewed.")
    ] = ""
    role: Annotated[Role, Meta(description="both, producer or consumer.")] = Role.BOTH
    modes: Annotated[
        tuple[Mode, ...],
        Meta(
            min_length=1,
            description="Transfer modes to offer, in order of preference. mapped costs the engine's own kernels, and "
            "is offered only if it is named here.",
        ),
    ] = (Mode.RING, Mode.CLIENT_MOVED, Mode.STREAMED)
    connect_s: Annotated[
        float,
        Meta(gt=0, le=60, description="To reach the server; the whole handshake may take three times as long."),
    ] = 2.0
    request_s: Annotated[float, Meta(gt=0, le=60, description="Deadline of a control request.")] = 2.0
    lookup_s: Annotated[float, Meta(gt=0, le=60, description="A lookup without an answer for this long is a miss.")] = (
        1.0
    )
    transfer_s: Annotated[float, Meta(gt=0, le=600, description="Deadline of one store or load, whole.")] = 30.0
    ring_slots: Annotated[
        int, Meta(ge=2, le=64, description="Slots of the ring for each direction; fewer if memory is short.")
    ] = 4
    ring_slot_bytes: Annotated[int, Meta(ge=MIB, le=GIB, description="Device memory of one slot.")] = 32 * MIB
    ring_keep_bytes: Annotated[
        int, Meta(ge=0, le=1 << 40, description="Device memory that stays free beside the ring.")
    ] = 512 * MIB
    store_generated: Annotated[bool, Meta(description="Store generated tokens, too.")] = False
    store_min_tokens: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Prompts with fewer tokens are not stored.")
    ] = 0
    load_min_tokens: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Hits that bring fewer tokens are computed instead of loaded.")
    ] = 0
    load_budget: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="A load that is expected to take more than this times as long as computing is not made, as far "
            "as both were measured; 0 loads every hit.",
        ),
    ] = 1.0
    label: Annotated[
        str, Meta(max_length=253, description="Name of this client on the admin face (the pod's name).")
    ] = ""
    node: Annotated[
        str, Meta(max_length=253, description="Name of this machine (the node's name); empty asks the kernel.")
    ] = ""
