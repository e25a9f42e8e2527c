"""The settings: one frozen object, built once at startup and passed down.

A setting is one field of `Settings`: its type holds its range; its metadata holds the unit, the text that
documents it, and whether a change needs a restart. The reference page, the sample file and the output of
`relayd check-config` are generated from the same fields (relayd/manual.py), so none of them can drift.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from msgspec import Meta
from strata.protocol.fields import CONTENT_ID

__all__ = ["ENV_PREFIX", "HARD_MAX_PACKET_BYTES", "Setting", "SettingSources", "Settings", "setting_table"]

ENV_PREFIX = "RELAYD_"

HARD_MAX_PACKET_BYTES = 1_048_576
"""No relay accepts a larger packet, whatever its settings say (R-119, A-012)."""

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, Meta(ge=1024, le=2**40)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Days = Annotated[int, Meta(ge=0, le=36_500)]
_Limit = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_LimitBytes = Annotated[int, Meta(ge=0, le=2**40)]
_Share = Annotated[float, Meta(ge=0, le=1000)]
_LongSeconds = Annotated[int, Meta(ge=1, le=100 * 365 * 86_400)]
_Hashes = tuple[Annotated[str, Meta(pattern=f"^{CONTENT_ID}$")], ...]


class SettingSources(NamedTuple):
    """The sources that settings were read from."""

    config_file: Path | None
    environ: Mapping[str, str]
    given: Mapping[str, object]


def _setting(default: _T, doc: str, *, unit: str = "", reload: bool = False, secret: bool = False) -> _T:
    """A field of `Settings`. `reload`: on SIGHUP a new value takes effect without a restart."""
    field: Any = dataclasses.field(
        default=default, metadata={"doc": doc, "unit": unit, "reload": reload, "secret": secret}
    )
    return field  # type: ignore[no-any-return]  # dataclasses types a field as its value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """Everything an operator can decide. `load` checks what it builds; the constructor checks nothing."""

    host: str = _setting(
        "127.0.0.1", "Address to listen on; `0.0.0.0` for every interface, or `::` for IPv6 only."
    )
    port: Annotated[int, Meta(ge=0, le=65_535)] = _setting(7447, "Port to listen on; 0 takes a free one.")
    path: Annotated[str, Meta(pattern=r"^/[A-Za-z0-9._~/-]*$")] = _setting(
        "/strata", "Path of the WebSocket endpoint."
    )
    public_url: str | None = _setting(
        None, "The `ws://` or `wss://` URL at which clients reach the relay; published in its manifest."
    )
    tls_cert: Path | None = _setting(
        None, "Certificate chain in PEM form; together with `tls_key` it enables `wss`.", reload=True
    )
    tls_key: Path | None = _setting(None, "Private key of `tls_cert` in PEM form.", reload=True)
    tls_self_made: bool = _setting(
        False,
        "Without `tls_cert`: generate a certificate at the first start, keep it in `data_dir`/tls, and"
        " accept both `wss` and `ws` on the port.",
    )
    console: bool = _setting(
        True, "Serve the console, a web page that shows what this relay carries, at `/` of the same port."
    )
    metrics_listen: str | None = _setting(
        None, "`host:port` to serve `/metrics` at, instead of the main port."
    )
    workers: Annotated[int, Meta(ge=1, le=256)] = _setting(
        1, "Relay processes that share the port and the database.", unit="processes"
    )

    worker_timeout: _Seconds = _setting(
        60.0,
        "How long a worker may be unresponsive before it is killed and restarted.",
        unit="seconds",
    )

    database_url: str | None = _setting(
        None,
        "PostgreSQL database of the log; without it an embedded server runs in `data_dir`. If the URL names"
        " several hosts, the first one that satisfies `target_session_attrs` is used.",
        secret=True,
    )
    read_database_url: str | None = _setting(
        None, "Replica to read history from; without it, history is read from `database_url`.", secret=True
    )
    bus_url: str | None = _setting(
        None,
        "NATS server (`nats://host:4222`) over which processes announce commits, instead of PostgreSQL's"
        " NOTIFY. Needs `relayd[bus]`.",
        secret=True,
    )
    bus_limits: bool = _setting(
        True,
        "With `bus_url`, each identity has one budget for all relays of the log on all machines; `false`"
        " gives it one on each machine.",
    )
    data_dir: Path = _setting(Path("./.relayd"), "Folder of the embedded PostgreSQL server.")
    log_guard: Path | None = _setting(
        None,
        "File outside the database that records how far the log was acknowledged; by default `log-guard` in"
        " `data_dir`.",
    )
    allow_unsafe_database: bool = _setting(
        False, "Start even on a database that could lose acknowledged packets, such as one with `fsync` off."
    )
    read_connections: Annotated[int, Meta(ge=1, le=1000)] = _setting(
        4,
        "Connections for reading history, for each process. While anyone publishes, pages are read one at a"
        " time; another is read only while a page waits for the disk.",
        unit="connections",
    )
    read_timeout: _Seconds = _setting(10.0, "Longest time one read of history may take.", unit="seconds")
    identity_seed: Annotated[str, Meta(pattern=r"^(0x)?[0-9A-Fa-f]{64}$")] | None = _setting(
        None,
        "Ed25519 seed of the relay's DID, 32 bytes in hex; by default one is made and kept in the database.",
        secret=True,
    )

    log_format: Literal["auto", "json", "console"] = _setting(
        "auto", "Form of the log on stderr; `auto` is `console` on a terminal and `json` elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least severe level logged.")

    tracing_url: str | None = _setting(
        None,
        "Collector for OpenTelemetry traces over OTLP/HTTP (`http://host:4318/v1/traces`); without it nothing"
        " is traced. Needs `relayd[tracing]`.",
        secret=True,
    )
    tracing_ratio: Annotated[float, Meta(ge=0, le=1)] = _setting(
        0.01,
        "Fraction of packets and of subscriptions that is traced, with `tracing_url`.",
        unit="of one",
    )

    max_packet_bytes: Annotated[int, Meta(ge=1024)] = _setting(
        262_144, "Largest packet, as canonical JSON; more than 1048576 counts as 1048576.", unit="bytes"
    )
    max_identity_bytes: Annotated[int, Meta(ge=4096, le=1_048_576)] = _setting(
        16_384,
        "Largest packet of the types that are kept for ever (key events, approvals, DID documents, client"
        " manifests, relay descriptors); an author's chain holds 64 times as much.",
        unit="bytes",
    )
    max_json_depth: Annotated[int, Meta(ge=8, le=512)] = _setting(
        64, "Deepest nesting of arrays and objects in a packet.", unit="levels"
    )
    max_json_values: Annotated[int, Meta(ge=1024, le=1_048_576)] = _setting(
        32_768, "Maximum number of numbers, strings, arrays and objects in a packet, in total.", unit="values"
    )
    max_packet_age_seconds: _LongSeconds = _setting(
        86_400, "Oldest `timestamp` a packet may have when it arrives.", unit="seconds"
    )
    dedup_window_seconds: _LongSeconds = _setting(
        604_800,
        "Shortest time a packet id is remembered; never below `max_packet_age_seconds`.",
        unit="seconds",
    )
    retention_days: _Days = _setting(
        30, "Whole days that packets are kept; 0 keeps them forever.", unit="days"
    )
    retention_requires_archive: bool = _setting(
        False,
        "Keep each day beyond `retention_days` until `archive_manifests` prove that it is archived. Needs"
        " relayd[archive].",
    )
    archive_manifests: Path | None = _setting(
        None, "Folder `_manifests` of the lake that the log is archived into, or a copy of that folder."
    )

    default_limit: Annotated[int, Meta(ge=1, le=10_000)] = _setting(
        100, "Stored packets a subscription gets if it names no `limit`.", unit="packets"
    )
    max_limit: Annotated[int, Meta(ge=1, le=10_000)] = _setting(
        500, "Most stored packets a subscription may ask for.", unit="packets"
    )
    max_subscriptions: _Count = _setting(64, "Subscriptions a connection may hold.", unit="subscriptions")
    max_filter_values: _Count = _setting(
        1000, "Maximum number of values in all lists of one filter together.", unit="values"
    )
    max_filter_bytes: _Bytes = _setting(
        2 * 2**20,
        "Memory that the filters of a connection may use; a thousand DIDs use half a MiB.",
        unit="bytes",
    )

    max_connections: _Count = _setting(
        10_000, "Connections open at once, for each process.", unit="connections"
    )
    max_pending_publishes: _Count = _setting(
        256,
        "Unanswered publishes of a connection at which the relay stops reading from it.",
        unit="publishes",
    )
    publish_queue_bytes: _Bytes = _setting(
        64 * 2**20,
        "Memory of packets on their way to the database, for each process, at which the relay stops reading. "
        "A packet counts five times its bytes, 100 bytes for each of its values, and 2 KiB.",
        unit="bytes",
    )
    publish_timeout: _Seconds = _setting(
        10.0, "How long a publish may wait for the database before it is refused.", unit="seconds"
    )
    verify_threads: Annotated[int, Meta(ge=1, le=64)] = _setting(
        2, "Threads that check signatures, for each process.", unit="threads"
    )
    outbound_queue_bytes: _Bytes = _setting(
        2**20,
        "Unsent bytes at which a connection leaves the live feed and continues from the store.",
        unit="bytes",
    )
    memory_limit_bytes: _LimitBytes = _setting(
        0,
        "Limit of each process's resident memory; close to it the relay refuses the clients that use most. 0"
        " means 60 % of the memory of the machine or its control group, divided by `workers`.",
        unit="bytes",
    )
    slow_consumer_timeout: _Seconds = _setting(
        60.0, "How long a connection may accept no bytes at all before it is closed.", unit="seconds"
    )
    handshake_timeout: _Seconds = _setting(10.0, "How long an opening handshake may take.", unit="seconds")
    ping_interval: _Seconds = _setting(30.0, "Time between pings to an idle connection.", unit="seconds")
    ping_misses: Annotated[int, Meta(ge=1, le=100)] = _setting(
        2, "Unanswered pings after which a connection is closed.", unit="pings"
    )
    malformed_limit: _Count = _setting(
        20, "Malformed frames of a connection within `malformed_window` that close it.", unit="frames"
    )
    malformed_window: _Seconds = _setting(
        60.0, "Window of `malformed_limit` and `control_frame_limit`.", unit="seconds"
    )
    control_frame_limit: _Count = _setting(
        1200,
        "Pings, pongs and fragments below 1 KiB of a connection within `malformed_window` that close it.",
        unit="frames",
    )
    drain_timeout: _Seconds = _setting(
        10.0, "How long a stopping relay waits for publishes in progress.", unit="seconds"
    )
    drain_spread: Annotated[float, Meta(ge=0, le=86_400)] = _setting(
        10.0,
        "Longest time over which a stopping process closes its connections (at least a hundred a second), so"
        " that they do not all reconnect elsewhere at once; 0 closes all together.",
        unit="seconds",
    )

    policies: tuple[str, ...] = _setting(
        (
            "blocked_authors",
            "blocked_packet_ids",
            "blocked_media_hashes",
            "blocked_types",
            "allowed_authors",
            "allowed_types",
            "abuse",
        ),
        "Policies that a packet must pass, in this order; the first refusal is the answer.",
        reload=True,
    )
    challenge_lifetime: Annotated[int, Meta(ge=1, le=86_400)] = _setting(
        120,
        "How long an AUTH_CHALLENGE can be answered; at least 60, and more than 600 counts as 600.",
        unit="seconds",
    )
    require_auth: tuple[Literal["publish", "subscribe"], ...] = _setting(
        (),
        "What a session must authenticate for: `publish`, `subscribe` or both; `subscribe` covers"
        " `/packets/{packet_id}`, `/did/` and `/did-docs/` too.",
        reload=True,
    )
    members: tuple[str, ...] = _setting(
        (),
        "DIDs that may authenticate for what `require_auth` names; an empty list means every DID.",
        reload=True,
    )
    replication_peers: tuple[str, ...] = _setting(
        (), "DIDs of the relays that may replicate from this one; they count as members.", reload=True
    )
    operators: tuple[str, ...] = _setting(
        (),
        "DIDs that may moderate over the wire, with the capability `operate`; they count as members."
        " If empty, the relay does not support such messages.",
        reload=True,
    )

    peers_file: Path | None = _setting(
        None,
        "TOML file with the URL and the DID of each relay that this one replicates from.",
    )
    max_backfill_seconds: _LongSeconds = _setting(
        604_800,
        "Oldest packet that is taken from a relay in `peers_file`; packets that carry keys may have any age.",
        unit="seconds",
    )
    reconcile_interval: Annotated[float, Meta(ge=0, le=86_400)] = _setting(
        300.0,
        "How often the packets of the last day are compared with each relay in `peers_file`; everything"
        " eligible is compared once a day. 0: only on request.",
        unit="seconds",
    )
    reconcile_max_items: Annotated[int, Meta(ge=1000, le=10_000_000)] = _setting(
        200_000,
        "Packets in one comparison with a peer, about 150 bytes each; more are compared a part at a time.",
        unit="packets",
    )

    announce_seconds: Annotated[int, Meta(ge=0, le=86_400)] = _setting(
        0,
        "Validity of the RELAY_DESCRIPTOR that the relay publishes about itself (needs `public_url`) and,"
        " with `replication_peers`, of its CONFIG `REPLICATION_POLICY_V1`. They are renewed after half"
        " that time. At least 600; 0: none.",
        unit="seconds",
    )

    trusted_proxies: tuple[str, ...] = _setting(
        (), "Networks (CIDR) of the reverse proxies that are trusted to report client addresses."
    )
    forwarded_header: Literal["x-forwarded-for", "forwarded"] = _setting(
        "x-forwarded-for",
        "The header in which `trusted_proxies` name the client's address; the other header is ignored.",
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "Web origins (`https://host`) whose pages may connect; an empty list means any. Programs send none,"
        " and the relay's own console may always connect, at `public_url` or by an IP address.",
        reload=True,
    )
    log_addresses: Literal["off", "truncated", "full"] = _setting(
        "off", "Whether log lines name the address of a client; `truncated` keeps its /24 or /48."
    )
    max_connections_per_address: _Limit = _setting(
        256,
        "Sessions open at once from one IPv4 address or IPv6 /64, at all workers together; 0 means no limit.",
        unit="connections",
    )
    unlimited_addresses: tuple[str, ...] = _setting(
        ("127.0.0.0/8", "::1/128"),
        "Networks (CIDR) exempt from the limits below and the cap above; a client behind a proxy is never"
        " exempt.",
    )
    limit_window_seconds: Annotated[int, Meta(ge=1, le=86_400)] = _setting(
        60,
        "Window of the limits below, each of which holds for all workers of a machine together, unless its"
        " line says otherwise. A used-up limit is refilled evenly over this time.",
        unit="seconds",
    )
    publish_limit: _Limit = _setting(
        12_000,
        "PUBLISHes of an authenticated identity in each window; 0 means no limit.",
        unit="messages",
    )
    subscribe_limit: _Limit = _setting(
        1200, "SUBSCRIBEs of an authenticated identity in each window; 0 means no limit.", unit="messages"
    )
    backfill_limit_bytes: _LimitBytes = _setting(
        2**30,
        "Stored packets sent to an authenticated identity in each window; more is sent later."
        " 0 means no limit.",
        unit="bytes",
    )
    anonymous_publish_limit: _Limit = _setting(
        1200,
        "PUBLISHes of anonymous sessions from one address in each window; 0 means no limit.",
        unit="messages",
    )
    anonymous_subscribe_limit: _Limit = _setting(
        240,
        "SUBSCRIBEs and reads of `/packets/{packet_id}` of anonymous clients from one address in each window;"
        " 0 means no limit.",
        unit="messages",
    )
    anonymous_backfill_limit_bytes: _LimitBytes = _setting(
        2**28,
        "Stored packets sent to anonymous sessions from one address in each window; more is sent later."
        " 0 means no limit.",
        unit="bytes",
    )
    auth_limit: _Limit = _setting(
        60, "AUTHs from one address in each window; 0 means no limit.", unit="messages"
    )
    refused_limit: _Limit = _setting(
        1200,
        "Refused messages of one connection in each window, after which it is closed with 1008;"
        " 0 means no limit.",
        unit="messages",
    )
    connection_limit: _Limit = _setting(
        600,
        "Sockets opened from one address in each window, for WebSockets and plain HTTP; 0 means no limit.",
        unit="connections",
    )
    identities_per_address: _Limit = _setting(
        1,
        "How many times the limit of one identity all authenticated sessions from one address may use"
        " together; 0 means no such ceiling.",
        unit="identities",
    )
    spare_members: bool = _setting(
        True,
        "Apply only the limits of their identity to `members` and `replication_peers`, not those of their"
        " address.",
        reload=True,
    )
    loop_share: _Share = _setting(
        0.1,
        "Fraction of the event loop's time that messages from one address may use, for each process; the rest"
        " is read later. 0 means no limit.",
        unit="of one",
    )
    read_share: _Share = _setting(
        1.0,
        "Fraction of the time of one database connection that pages and look-ups for one address may use, for"
        " each process; the rest is read later. 0 means no limit.",
        unit="of one",
    )

    bootstrap_file: Path | None = _setting(
        None, "JSON file with DID documents, keys and roots that are trusted without further proof."
    )
    clock_skew_seconds: int = _setting(
        300,
        "How far clocks may differ when a key's validity is judged; 60 to 300, any other value counts as 300."
        " A value in the bootstrap file takes precedence.",
        unit="seconds",
    )
    recovery_delay_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = _setting(
        86_400, "How long a key event signed by a recovery key waits for objections.", unit="seconds"
    )
    strong_edges_per_day: _Limit = _setting(
        20,
        "Trust edges above 0.5 that an identity may publish in 24 hours, at all processes of the database"
        " together; 0 means no limit.",
        unit="packets",
    )
    weak_edges_per_day: _Limit = _setting(
        100,
        "Trust edges up to 0.5 that an identity may publish in 24 hours, at all processes of the database"
        " together; 0 means no limit.",
        unit="packets",
    )
    trust_revocations_per_day: _Limit = _setting(
        120,
        "Trust revocations that an identity may publish in 24 hours, at all processes of the database"
        " together; 0 means no limit.",
        unit="packets",
    )
    evidence_plugins: tuple[str, ...] = _setting(
        (), "Installed verifiers of platform evidence (entry points of `relayd.evidence`) to use."
    )
    refused_clients: tuple[str, ...] = _setting(
        (), "DIDs of client software whose attestations are not accepted.", reload=True
    )
    abuse_refresh_interval: _Seconds = _setting(60.0, "How often the abuse table is read.", unit="seconds")

    blocked_authors: tuple[str, ...] = _setting(
        (), "DIDs whose packets are refused; stored ones are no longer served.", reload=True
    )
    blocked_packet_ids: _Hashes = _setting(
        (), "Ids of packets that are refused; stored ones are no longer served.", reload=True
    )
    blocked_media_hashes: _Hashes = _setting(
        (),
        "Media hashes; packets that refer to one are refused, and stored ones are no longer served.",
        reload=True,
    )
    blocked_types: tuple[str, ...] = _setting(
        (), "Content types whose packets are refused; stored ones are no longer served.", reload=True
    )
    allowed_authors: tuple[str, ...] = _setting(
        (), "The only DIDs whose packets are accepted; an empty list means every DID.", reload=True
    )
    allowed_types: tuple[str, ...] = _setting(
        (),
        "The only content types accepted, besides those of identities; an empty list means all.",
        reload=True,
    )
    policy_plugins: tuple[str, ...] = _setting(
        (), "Entry points of the group `relayd.policies` that are asked last, in this order."
    )
    policy_timeout: _Seconds = _setting(1.0, "How long one plug-in may take over a packet.", unit="seconds")
    policy_failure: Literal["refuse", "accept"] = _setting(
        "refuse", "What happens to a packet when a plug-in fails or takes too long."
    )
    provenance_downgrade: Literal["rewrite", "annotate"] = _setting(
        "rewrite",
        "How a packet with an unproven origin is served: with the origin replaced, or as signed; "
        "annotated either way.",
    )

    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What `load` changed or warns about; for the log, not a setting."""
    origin: SettingSources | None = dataclasses.field(default=None, compare=False)
    """The sources that `load` read the values from; `reloaded` reads them again."""

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame read: room for a largest packet with its escapes and envelope (R-123, A-013)."""
        return 2 * self.max_packet_bytes + 65_536

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.shown().items())
        return f"Settings({shown})"

    def shown(self) -> dict[str, object]:
        """Every setting by name, fit to print: a secret that is set reads `********`."""
        return {
            name: "********" if row.secret and getattr(self, name) is not None else getattr(self, name)
            for name, row in setting_table().items()
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting, without its value."""

    name: str
    type: object
    default: Any
    unit: str
    doc: str
    reload: bool
    secret: bool

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)


@functools.cache
def setting_table() -> Mapping[str, Setting]:
    """Every setting by name, in the order of the reference page."""
    hints = get_type_hints(Settings, include_extras=True)
    return {
        field.name: Setting(field.name, hints[field.name], field.default, **_metadata(field))
        for field in dataclasses.fields(Settings)
        if "doc" in field.metadata
    }


def _metadata(field: dataclasses.Field[Any]) -> dict[str, Any]:
    return {name: field.metadata[name] for name in ("unit", "doc", "reload", "secret")}
