"""Checks for faults that only show in several settings together, or that no type can express."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from strata.protocol.auth import MIN_LIFETIME_SECONDS
from strata.protocol.ids import is_did
from strata.protocol.keys import IDENTITY_TYPES

from relayd.addresses import is_network, normal_origin
from relayd.config.settings import Settings, setting_table
from relayd.database_url import fault_of

__all__ = ["advice", "contradictions", "unknown"]

_EVERY_INTERFACE = frozenset({"", "0.0.0.0", "::"})
_RATE_LIMITS = frozenset(
    {"max_connections_per_address", "auth_limit", "connection_limit"}
    | {f"{who}{what}" for who in ("", "anonymous_") for what in ("publish_limit", "subscribe_limit")}
    | {"backfill_limit_bytes", "anonymous_backfill_limit_bytes"}
)


def contradictions(settings: Settings) -> list[str]:
    """Faults that only show in several settings together, or that no type can express."""
    problems = []
    if not settings.host:  # the system would take it as every interface, but clients could not use it
        problems.append("host is empty; for every interface write 0.0.0.0, or :: by IPv6 alone")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append("tls_cert and tls_key are only of use together; set both or neither")
    if settings.default_limit > settings.max_limit:
        problems.append(f"default_limit ({settings.default_limit}) is above max_limit ({settings.max_limit})")
    if settings.dedup_window_seconds < settings.max_packet_age_seconds:
        # Else a packet could be forgotten while it is still young enough to be accepted again.
        problems.append(
            f"dedup_window_seconds ({settings.dedup_window_seconds}) is below "
            f"max_packet_age_seconds ({settings.max_packet_age_seconds})"
        )
    problems += _federation_problems(settings)
    if settings.retention_requires_archive and settings.archive_manifests is None:
        problems.append(
            "retention_requires_archive needs archive_manifests: the folder _manifests of the lake that"
            " `strata-pipeline archive` writes"
        )
    if settings.retention_requires_archive and importlib.util.find_spec("strata_pipeline") is None:
        problems.append(
            "retention_requires_archive needs the reader of lakes: install relayd[archive] (in a checkout"
            " ./pipeline)"
        )
    for name in ("blocked_authors", "allowed_authors", "refused_clients"):
        problems += [f"{name}: {did} is not a DID" for did in getattr(settings, name) if not is_did(did)]
    problems += _policy_problems(settings)
    problems += _access_problems(settings)
    if settings.public_url is not None and not _is_url(settings.public_url, {"ws", "wss"}):
        problems.append("public_url: expected a ws:// or wss:// URL")
    if 0 < settings.announce_seconds < 600:
        problems.append("announce_seconds is below 600")
    if settings.announce_seconds and settings.public_url is None:
        problems.append("announce_seconds needs public_url: the relay does not know where it is reached")
    for name in ("database_url", "read_database_url"):
        url = getattr(settings, name)
        if url is not None and (fault := fault_of(url)) is not None:
            problems.append(f"{name}: {fault}")
    if settings.read_database_url is not None and settings.database_url is None:
        problems.append("read_database_url needs database_url: the embedded server has no replica")
    if settings.bus_url is not None:
        if not _is_url(settings.bus_url, {"nats", "tls"}):
            problems.append("bus_url: expected a nats:// or tls:// URL")
        if importlib.util.find_spec("nats") is None:
            problems.append("bus_url needs the client of NATS: install relayd[bus]")
    if settings.tracing_url is not None:
        if not _is_url(settings.tracing_url, {"http", "https"}):
            problems.append("tracing_url: expected an http:// or https:// URL")
        if importlib.util.find_spec("opentelemetry") is None:
            problems.append("tracing_url needs OpenTelemetry: install relayd[tracing]")
    if settings.metrics_listen is not None and not _is_address(settings.metrics_listen):
        problems.append("metrics_listen: expected host:port")
    elif settings.metrics_listen is not None and _is_main_port(settings):
        problems.append("metrics_listen is the relay's own address; choose another port, or leave it out")
    return problems


def _federation_problems(settings: Settings) -> list[str]:
    """Faults in how long packets are remembered: as long as peers may send them (R-370)."""
    if settings.peers_file is None:
        return []
    backfill = settings.max_backfill_seconds
    problems = []
    if settings.dedup_window_seconds < backfill:
        problems.append(
            f"dedup_window_seconds ({settings.dedup_window_seconds}) is below"
            f" max_backfill_seconds ({backfill})"
        )
    if settings.retention_days and settings.retention_days * 86_400 < backfill + 86_400:
        problems.append(
            f"retention_days ({settings.retention_days}) is less than"
            f" max_backfill_seconds ({backfill}) and a day"
        )
    return problems


def _access_problems(settings: Settings) -> list[str]:
    """Faults in the settings of access: who may connect and do what."""
    problems = []
    if settings.challenge_lifetime < MIN_LIFETIME_SECONDS:
        # no shorter window is possible, so none can be configured.
        problems.append(f"challenge_lifetime ({settings.challenge_lifetime}) is below {MIN_LIFETIME_SECONDS}")
    for name in ("members", "replication_peers", "operators"):
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
        if normal_origin(origin) is None
    ]
    return problems


def _policy_problems(settings: Settings) -> list[str]:
    known = setting_table()["policies"].default
    problems = [unknown("policy", name, known) for name in settings.policies if name not in known]
    if len(set(settings.policies)) < len(settings.policies):
        problems.append("policies: a policy is named twice")
    problems += [
        f"{name} is set, and policies does not name it"
        for name in known
        if getattr(settings, name, ()) and name not in settings.policies
    ]
    problems += [
        # Else a key that its owner has revoked could still sign.
        f"blocked_types: {type_} carries keys and their revocation, and cannot be blocked"
        for type_ in settings.blocked_types
        if type_ in IDENTITY_TYPES
    ]
    return problems


def advice(settings: Settings, given: Iterable[str]) -> tuple[str, ...]:
    """Effects of the given values that an operator may not expect."""
    limits = sorted(_RATE_LIMITS.intersection(given))
    if not limits or not settings.unlimited_addresses or "unlimited_addresses" in given:
        return ()
    # An operator who sets a limit and tests it on this machine would see no effect.
    networks = ", ".join(settings.unlimited_addresses)
    return (f"{', '.join(limits)}: no limit holds for {networks} (unlimited_addresses)",)


def unknown(what: str, name: str, valid: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest valid one."""
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"unknown {what} {name}; the nearest is {nearest[0]}"


def _is_url(text: str, schemes: set[str]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_main_port(settings: Settings) -> bool:
    host, _, port = (settings.metrics_listen or "").rpartition(":")
    hosts = {host.strip("[]"), settings.host}
    return int(port) == settings.port != 0 and (len(hosts) == 1 or bool(hosts & _EVERY_INTERFACE))


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+):(\d{1,5})", text)
    return found is not None and int(found[2]) <= 65_535
