"""The settings: one frozen object, built once at start and passed down.

A setting is one field of `Settings`: its type holds its range, its metadata holds the unit, the one
sentence that documents it, and whether a change needs a restart. The reference page, the sample file and
`relayd check-config` are made from the same fields (relayd/manual.py), so none of them can drift.

A value comes from the first of: the command line, the environment (`RELAYD_<KEY>`, or `RELAYD_<KEY>_FILE`
for a secret), the TOML file, the default. An empty variable counts as absent, because compose files pass
empty ones. `--data-dir` on the command line asks for the embedded server, and so puts aside a
`database_url` from a lower place.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from strata.auth import MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS
from strata.ids import is_did
from strata.keys import IDENTITY_TYPES

from relayd.addresses import is_network

__all__ = [
    "ENV_PREFIX",
    "HARD_MAX_PACKET_BYTES",
    "ConfigurationError",
    "Setting",
    "Settings",
    "load",
    "setting_table",
]

ENV_PREFIX = "RELAYD_"

HARD_MAX_PACKET_BYTES = 1_048_576
"""No relay accepts a larger packet, whatever its settings say (R-119, A-012)."""

# Variables of ours that are not settings: where the file is, and what the tests use.
_OTHER_VARIABLES = ("RELAYD_CONFIG",)
_OTHER_PREFIXES = ("RELAYD_TEST_",)

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, Meta(ge=1024, le=2**40)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Days = Annotated[int, Meta(ge=0, le=36_500)]
_Limit = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_LimitBytes = Annotated[int, Meta(ge=0, le=2**40)]
_LongSeconds = Annotated[int, Meta(ge=1, le=100 * 365 * 86_400)]
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^/?#\s:@]+)(:\d{1,5})?|null", re.IGNORECASE)
_RATE_LIMITS = frozenset(
    {"max_connections_per_address", "auth_limit", "connection_limit"}
    | {f"{who}{what}" for who in ("", "anonymous_") for what in ("publish_limit", "subscribe_limit")}
    | {"backfill_limit_bytes", "anonymous_backfill_limit_bytes"}
)
_Hashes = tuple[Annotated[str, Meta(pattern=r"^0x[0-9a-f]{64}$")], ...]


class _Origin(NamedTuple):
    config_file: Path | None
    environ: Mapping[str, str]
    given: Mapping[str, object]


class ConfigurationError(Exception):
    """The settings cannot be used. `problems` holds every fault found, one sentence each, without secrets."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def _setting(default: _T, doc: str, *, unit: str = "", reload: bool = False, secret: bool = False) -> _T:
    """A field of `Settings`. `reload`: SIGHUP takes a new value over without a restart."""
    field: Any = dataclasses.field(
        default=default, metadata={"doc": doc, "unit": unit, "reload": reload, "secret": secret}
    )
    return field  # type: ignore[no-any-return]  # dataclasses types a field as its value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """Everything an operator can decide. Built by `load`, which checks it; building one directly does not."""

    host: str = _setting("127.0.0.1", "Address to listen on; `0.0.0.0` or `::` for every interface.")
    port: Annotated[int, Meta(ge=0, le=65_535)] = _setting(7447, "Port to listen on; 0 takes a free one.")
    path: Annotated[str, Meta(pattern=r"^/[A-Za-z0-9._~/-]*$")] = _setting(
        "/strata", "Path of the WebSocket endpoint."
    )
    public_url: str | None = _setting(
        None, "The `ws://` or `wss://` URL by which clients reach the relay, for its manifest."
    )
    tls_cert: Path | None = _setting(
        None, "Certificate chain in PEM form; with `tls_key` the relay speaks `wss`.", reload=True
    )
    tls_key: Path | None = _setting(None, "Private key of `tls_cert` in PEM form.", reload=True)
    metrics_listen: str | None = _setting(
        None, "`host:port` that serves `/metrics` in place of the main port, which then does not."
    )
    workers: Annotated[int, Meta(ge=1, le=256)] = _setting(
        1, "Relay processes that share the port and the database.", unit="processes"
    )

    database_url: str | None = _setting(
        None, "PostgreSQL that keeps the log; without it an embedded server runs in `data_dir`.", secret=True
    )
    read_database_url: str | None = _setting(
        None, "Replica that history is read from; without it `database_url` is.", secret=True
    )
    data_dir: Path = _setting(Path("./.relayd"), "Folder of the embedded PostgreSQL server.")
    allow_unsafe_database: bool = _setting(
        False, "Start even on a database that could lose what was acknowledged, such as one with `fsync` off."
    )
    read_connections: Annotated[int, Meta(ge=1, le=1000)] = _setting(
        4, "Connections for reading history, for each process.", unit="connections"
    )
    read_timeout: _Seconds = _setting(10.0, "Longest time one read of history may take.", unit="seconds")
    identity_seed: Annotated[str, Meta(pattern=r"^(0x)?[0-9A-Fa-f]{64}$")] | None = _setting(
        None,
        "Ed25519 seed of the relay's DID, 32 bytes in hex; without it one is made and kept in the database.",
        secret=True,
    )

    log_format: Literal["auto", "json", "console"] = _setting(
        "auto", "Form of the log on stderr; `auto` is `console` on a terminal and `json` elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least severe level logged.")

    max_packet_bytes: Annotated[int, Meta(ge=1024)] = _setting(
        262_144, "Largest packet, as canonical JSON; more than 1048576 counts as 1048576.", unit="bytes"
    )
    max_json_depth: Annotated[int, Meta(ge=8, le=512)] = _setting(
        64, "Deepest nesting of arrays and objects in a packet.", unit="levels"
    )
    max_packet_age_seconds: _LongSeconds = _setting(
        86_400, "Oldest `timestamp` a packet may have when it arrives.", unit="seconds"
    )
    dedup_window_seconds: _LongSeconds = _setting(
        604_800,
        "How long a packet id is remembered at least; never below `max_packet_age_seconds`.",
        unit="seconds",
    )
    retention_days: _Days = _setting(
        30, "Whole days that packets are kept; 0 keeps them forever.", unit="days"
    )

    default_limit: Annotated[int, Meta(ge=1, le=10_000)] = _setting(
        100, "Stored packets a subscription gets if it names no `limit`.", unit="packets"
    )
    max_limit: Annotated[int, Meta(ge=1, le=10_000)] = _setting(
        500, "Stored packets a subscription gets at most.", unit="packets"
    )
    max_subscriptions: _Count = _setting(64, "Subscriptions a connection may hold.", unit="subscriptions")
    max_filter_values: _Count = _setting(1000, "Values one list of a filter may hold.", unit="values")

    max_connections: _Count = _setting(
        10_000, "Connections open at once, for each process.", unit="connections"
    )
    max_pending_publishes: _Count = _setting(
        256, "Publishes of a connection that may wait for their answer; more pause reading.", unit="publishes"
    )
    publish_queue_bytes: _Bytes = _setting(
        64 * 2**20, "Packets waiting for the database, for each process; more pause reading.", unit="bytes"
    )
    publish_timeout: _Seconds = _setting(
        10.0, "How long a publish may wait for the database before it is refused.", unit="seconds"
    )
    verify_threads: Annotated[int, Meta(ge=1, le=64)] = _setting(
        2, "Threads that check signatures, for each process.", unit="threads"
    )
    outbound_queue_bytes: _Bytes = _setting(
        2**20, "Unsent bytes of a connection at which it leaves the live feed for the store.", unit="bytes"
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
        20, "Malformed frames within `malformed_window` that close a connection.", unit="frames"
    )
    malformed_window: _Seconds = _setting(60.0, "Window of `malformed_limit`.", unit="seconds")
    drain_timeout: _Seconds = _setting(
        10.0, "How long a stopping relay waits for what it has begun.", unit="seconds"
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
        "Policies a packet has to pass, in the order they are asked; the first refusal is the answer.",
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
        " `/packets/{packet_id}` too.",
        reload=True,
    )
    members: tuple[str, ...] = _setting(
        (),
        "DIDs that gain by authenticating what `require_auth` keeps from the others; none listed: every DID.",
        reload=True,
    )
    replication_peers: tuple[str, ...] = _setting(
        (), "DIDs of the relays that may replicate from this one; they count as members.", reload=True
    )

    trusted_proxies: tuple[str, ...] = _setting(
        (), "Networks (CIDR) of the reverse proxies that are believed about whose address a client has."
    )
    forwarded_header: Literal["x-forwarded-for", "forwarded"] = _setting(
        "x-forwarded-for", "The header in which `trusted_proxies` say it; the other one is ignored."
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "Web origins (`https://host`) whose pages may connect; none listed: any. Programs send no origin.",
        reload=True,
    )
    log_addresses: Literal["off", "truncated", "full"] = _setting(
        "off", "Whether a line about a connection names its client's address; `truncated`: /24 or /48 of it."
    )
    max_connections_per_address: _Limit = _setting(
        256, "Sessions open at once from one IPv4 address or IPv6 /64, for each process.", unit="connections"
    )
    unlimited_addresses: tuple[str, ...] = _setting(
        ("127.0.0.0/8", "::1/128"),
        "Networks (CIDR) from which no limit below and no cap above holds; what comes through a proxy never"
        " counts as one of them.",
    )
    limit_window_seconds: Annotated[int, Meta(ge=1, le=86_400)] = _setting(
        60, "Window of the limits below: what is spent comes back evenly over this time.", unit="seconds"
    )
    publish_limit: _Limit = _setting(
        12_000,
        "PUBLISHes of an authenticated identity in each window, for each process; 0: any.",
        unit="messages",
    )
    subscribe_limit: _Limit = _setting(
        1200, "SUBSCRIBEs of an authenticated identity in each window; 0: any.", unit="messages"
    )
    backfill_limit_bytes: _LimitBytes = _setting(
        2**30,
        "Stored packets sent to an authenticated identity in each window; more is sent later. 0: any.",
        unit="bytes",
    )
    anonymous_publish_limit: _Limit = _setting(
        1200, "PUBLISHes of anonymous sessions from one address in each window; 0: any.", unit="messages"
    )
    anonymous_subscribe_limit: _Limit = _setting(
        240,
        "SUBSCRIBEs and reads of `/packets/{packet_id}` of anonymous clients from one address in each window;"
        " 0: any.",
        unit="messages",
    )
    anonymous_backfill_limit_bytes: _LimitBytes = _setting(
        2**28,
        "Stored packets sent to anonymous sessions from one address in each window; more is sent later."
        " 0: any.",
        unit="bytes",
    )
    auth_limit: _Limit = _setting(60, "AUTHs from one address in each window; 0: any.", unit="messages")
    connection_limit: _Limit = _setting(
        600, "Connections opened from one address in each window; 0: any.", unit="connections"
    )

    bootstrap_file: Path | None = _setting(
        None, "JSON file with DID documents, keys and roots that are trusted as they stand."
    )
    clock_skew_seconds: int = _setting(
        300,
        "How far clocks may disagree about a key's validity; 60 to 300, anything else counts as 300, and the"
        " bootstrap file's value goes first.",
        unit="seconds",
    )
    recovery_delay_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = _setting(
        86_400, "How long a key event signed by a recovery key waits for objections.", unit="seconds"
    )
    strong_edges_per_day: _Limit = _setting(
        20, "Trust edges above 0.5 that an identity may publish in 24 hours; 0: any.", unit="packets"
    )
    weak_edges_per_day: _Limit = _setting(
        100, "Trust edges up to 0.5 that an identity may publish in 24 hours; 0: any.", unit="packets"
    )
    trust_revocations_per_day: _Limit = _setting(
        120, "Trust revocations that an identity may publish in 24 hours; 0: any.", unit="packets"
    )
    evidence_plugins: tuple[str, ...] = _setting(
        (), "Installed verifiers of platform evidence (entry points of `relayd.evidence`) to use."
    )
    refused_clients: tuple[str, ...] = _setting(
        (), "DIDs of client software whose attestations are not honoured.", reload=True
    )
    abuse_refresh_interval: _Seconds = _setting(60.0, "How often the abuse table is read.", unit="seconds")

    blocked_authors: tuple[str, ...] = _setting(
        (), "DIDs whose packets are refused, and no longer served where stored.", reload=True
    )
    blocked_packet_ids: _Hashes = _setting(
        (), "Ids of packets that are refused, and no longer served where stored.", reload=True
    )
    blocked_media_hashes: _Hashes = _setting(
        (), "Media hashes; packets that refer to one are refused, and no longer served.", reload=True
    )
    blocked_types: tuple[str, ...] = _setting(
        (), "Content types whose packets are refused, and no longer served where stored.", reload=True
    )
    allowed_authors: tuple[str, ...] = _setting(
        (), "DIDs whose packets alone are taken; empty means anyone's.", reload=True
    )
    allowed_types: tuple[str, ...] = _setting(
        (), "Content types that alone are taken, beside those of identities; empty means all.", reload=True
    )
    policy_plugins: tuple[str, ...] = _setting(
        (), "Entry points of the group `relayd.policies` that are asked last, in this order."
    )
    policy_timeout: _Seconds = _setting(1.0, "How long one plug-in may take over a packet.", unit="seconds")
    policy_failure: Literal["refuse", "accept"] = _setting(
        "refuse", "What becomes of a packet about which a plug-in fails or takes too long."
    )
    provenance_downgrade: Literal["rewrite", "annotate"] = _setting(
        "rewrite",
        "How a packet with an unproven origin is served: with the origin replaced, or as signed; "
        "annotated either way.",
    )

    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What `load` changed or advises against; for the log, not a setting."""
    origin: _Origin | None = dataclasses.field(default=None, compare=False)
    """Where `load` took the values from, for `reloaded`."""

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame read: room for escapes and the envelope around a largest packet (R-123, A-013)."""
        return 2 * self.max_packet_bytes + 65_536

    def reloaded(self) -> Settings:
        """These settings, with those that SIGHUP may change read anew from where they came from.

        Raises `ConfigurationError`; the settings in use then stay as they are.
        """
        if self.origin is None:
            return self
        fresh = load(*self.origin)
        changed = {row.name: getattr(fresh, row.name) for row in setting_table().values() if row.reload}
        return dataclasses.replace(self, **changed)

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
    """What is known about one setting, beside its value."""

    name: str
    type: Any
    default: Any
    unit: str
    doc: str
    reload: bool
    secret: bool

    @property
    def variable(self) -> str:
        """Its environment variable."""
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


def load(
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cli_overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Build the settings; a command line value of None counts as not given.

    Reads `config_file` and the files that `_FILE` variables name, nothing else. Raises
    `ConfigurationError` with all problems at once.
    """
    problems: list[str] = []
    given = {name: value for name, value in (cli_overrides or {}).items() if value is not None}
    values = _from_file(config_file, problems)
    values |= _from_environment(environ or {}, problems)
    if "data_dir" in given and "database_url" not in given:
        values.pop("database_url", None)
    elif "data_dir" in given:
        problems.append("--database-url and --data-dir exclude each other")
    values |= _convert(given, problems, lambda row: "--" + row.name.replace("_", "-"), lax=False)
    settings = dataclasses.replace(Settings(), **values)
    problems += _contradictions(settings)
    if problems:
        raise ConfigurationError(problems)
    ours = {name: text for name, text in (environ or {}).items() if name.startswith(ENV_PREFIX)}
    origin = _Origin(config_file, ours, given)
    return _clamped(dataclasses.replace(settings, origin=origin, warnings=_advice(settings, values)))


def _from_file(path: Path | None, problems: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
        return {}
    return _convert(raw, problems, lambda row: f"{path}: {row.name}", lax=False, source=f"{path}: ")


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    by_variable = {row.variable: row for row in setting_table().values()}
    valid = {variable + "_FILE" for variable, row in by_variable.items() if row.secret} | set(by_variable)
    texts: dict[str, object] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or not environ[variable]:
            continue
        if variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES):
            continue
        if variable not in valid:
            problems.append(_unknown("environment variable", variable, valid))
        elif variable in by_variable:
            texts[by_variable[variable].name] = environ[variable]
        else:
            text = _read_secret(variable, environ, problems)
            if text is not None:
                texts[by_variable[variable.removesuffix("_FILE")].name] = text
    return _convert(texts, problems, lambda row: row.variable, lax=True)


def _read_secret(variable: str, environ: Mapping[str, str], problems: list[str]) -> str | None:
    if environ.get(variable.removesuffix("_FILE")):
        problems.append(f"{variable} and {variable.removesuffix('_FILE')} exclude each other")
        return None
    try:
        return Path(environ[variable]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        problems.append(f"{variable}: cannot read {environ[variable]}: {why}")
        return None


def _convert(
    raw: Mapping[str, object],
    problems: list[str],
    label: Callable[[Setting], str],
    *,
    lax: bool,
    source: str = "",
) -> dict[str, Any]:
    """Bring raw values to their types. `lax` reads numbers, booleans and comma-separated lists from text."""
    table = setting_table()
    values: dict[str, Any] = {}
    for name, value in raw.items():
        row = table.get(name)
        if row is None:
            problems.append(source + _unknown("setting", name, table))
            continue
        if lax and row.is_list:
            value = [item.strip() for item in str(value).split(",") if item.strip()]
        try:
            values[name] = msgspec.convert(value, row.type, strict=not lax, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            # msgspec names types and ranges, never the value, so a secret cannot show here.
            problems.append(f"{label(row)}: {_first_lower(str(error))}")
    return values


def _decode_path(type_: type, value: object) -> object:
    if type_ is Path and isinstance(value, str | Path):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `str`, got `{type(value).__name__}`")


def _contradictions(settings: Settings) -> list[str]:
    """Faults that only show in values seen together, or that no type can express."""
    problems = []
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append("tls_cert and tls_key are only of use together; set both or neither")
    if settings.default_limit > settings.max_limit:
        problems.append(f"default_limit ({settings.default_limit}) is above max_limit ({settings.max_limit})")
    if settings.dedup_window_seconds < settings.max_packet_age_seconds:
        # Else a packet could be forgotten while it is still young enough to be taken again.
        problems.append(
            f"dedup_window_seconds ({settings.dedup_window_seconds}) is below "
            f"max_packet_age_seconds ({settings.max_packet_age_seconds})"
        )
    for name in ("blocked_authors", "allowed_authors", "refused_clients"):
        problems += [f"{name}: {did} is not a DID" for did in getattr(settings, name) if not is_did(did)]
    problems += _policy_problems(settings)
    problems += _access_problems(settings)
    if settings.public_url is not None and not _is_url(settings.public_url, {"ws", "wss"}):
        problems.append("public_url: expected a ws:// or wss:// URL")
    for name in ("database_url", "read_database_url"):
        url = getattr(settings, name)
        if url is not None and not url.startswith(("postgresql://", "postgres://")):
            problems.append(f"{name}: expected a postgresql:// URL")
    if settings.read_database_url is not None and settings.database_url is None:
        problems.append("read_database_url needs database_url: the embedded server has no replica")
    if settings.metrics_listen is not None and not _is_address(settings.metrics_listen):
        problems.append("metrics_listen: expected host:port")
    return problems


def _access_problems(settings: Settings) -> list[str]:
    """Faults in who may come in and do what."""
    problems = []
    if settings.challenge_lifetime < MIN_LIFETIME_SECONDS:
        # a shorter window is not to be had, so it is not configured either.
        problems.append(f"challenge_lifetime ({settings.challenge_lifetime}) is below {MIN_LIFETIME_SECONDS}")
    for name in ("members", "replication_peers"):
        problems += [f"{name}: {did} is not a DID" for did in getattr(settings, name) if not is_did(did)]
    for name in ("trusted_proxies", "unlimited_addresses"):
        problems += [
            f"{name}: {text} is not a network such as 192.0.2.0/24"
            for text in getattr(settings, name)
            if not is_network(text)
        ]
    problems += [
        f"allowed_origins: {origin} is not an origin such as https://example.org"
        for origin in settings.allowed_origins
        if _ORIGIN.fullmatch(origin) is None
    ]
    return problems


def _policy_problems(settings: Settings) -> list[str]:
    known = setting_table()["policies"].default
    problems = [_unknown("policy", name, known) for name in settings.policies if name not in known]
    if len(set(settings.policies)) < len(settings.policies):
        problems.append("policies: a policy is named twice")
    problems += [
        f"{name} is set, and policies does not name it"
        for name in known
        if getattr(settings, name, ()) and name not in settings.policies
    ]
    problems += [
        # A key that its owner has revoked would go on signing.
        f"blocked_types: {type_} carries keys and their revocation, and cannot be blocked"
        for type_ in settings.blocked_types
        if type_ in IDENTITY_TYPES
    ]
    return problems


def _clamped(settings: Settings) -> Settings:
    """Bring what is too large down to what is used, with a warning for each (R-119, R-272)."""
    changed: dict[str, Any] = {}
    warnings = list(settings.warnings)
    for name, most, what in (
        ("max_packet_bytes", HARD_MAX_PACKET_BYTES, "the hard limit"),
        ("challenge_lifetime", MAX_LIFETIME_SECONDS, "what clients accept"),
    ):
        value = getattr(settings, name)
        if value > most:
            changed[name] = most
            warnings.append(f"{name} {value} is above {what}; using {most}")
    return dataclasses.replace(settings, **changed, warnings=tuple(warnings))


def _advice(settings: Settings, given: Iterable[str]) -> tuple[str, ...]:
    """What an operator may not expect of the values given."""
    limits = sorted(_RATE_LIMITS.intersection(given))
    if not limits or not settings.unlimited_addresses or "unlimited_addresses" in given:
        return ()
    # Whoever sets a limit and tries it out on the spot would find that it does nothing.
    networks = ", ".join(settings.unlimited_addresses)
    return (f"{', '.join(limits)}: no limit holds for {networks} (unlimited_addresses)",)


def _unknown(what: str, name: str, valid: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"unknown {what} {name}; the nearest is {nearest[0]}"


def _is_url(text: str, schemes: set[str]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+):(\d{1,5})", text)
    return found is not None and int(found[2]) <= 65_535


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]
