"""The work of `strata relays` on the scores file."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from strata.channels.connecting import connect
from strata.protocol.errors import ConnectionFailed, StrataError
from strata.relays import uris
from strata.relays.bootstrap import read_bootstrap
from strata.relays.conduct import WINDOW_SECONDS, Aspect, Saved, Score, Standing
from strata.relays.connection import Options
from strata.relays.connection.dialing import check_url
from strata.relays.pool.reputation import Observation, Reputation
from strata.relays.pool.score_file import ScoreFile
from strata.tools.cli import output
from strata.tools.cli.running import run
from strata.tools.cli.status import round_trip

__all__ = ["add", "forget", "probe", "show"]

_COLUMNS = f"{'state':<12}{'score':>6}  {'latency':>9}  {'uptime':>6}  {'last seen':<20}  relay"


def show(path: Path, *, as_json: bool) -> None:
    """Print every relay, best first."""
    with _opened(path) as file:
        known = [(relay.url, *_current(file, relay.url)) for relay in file.relays()]
    if not known and not as_json:
        output.note("no relays are known yet; add one with: strata relays add URL")
        return
    order = list(Standing)
    known.sort(key=lambda row: (order.index(row[1].standing), -row[2].value))
    if not as_json:
        output.write_line(_COLUMNS)
    for url, saved, score in known:
        _write(url, saved, score, as_json=as_json)


def add(path: Path, relays: Sequence[str], list_file: Path | None, *, yes: bool, as_json: bool) -> None:
    """Add relays from the command line and from a bootstrap file."""
    if not relays and list_file is None:
        output.misuse("give URLs, or a list of them with --from")
    try:
        urls = [_agreed(relay, yes=yes) for relay in relays]
        if list_file is not None:
            urls += [relay.url for relay in read_bootstrap(list_file).relays]
        for url in urls:
            check_url(url)
    except (ValueError, OSError, ConnectionFailed) as error:
        output.misuse(error)
    with _opened(path) as file:
        for url in dict.fromkeys(urls):
            is_new = file.add(url, time.time())
            if as_json:
                output.write_record({"url": url, "added": is_new})
            else:
                output.write_line(f"{'added' if is_new else 'known already'}: {output.harmless(url)}")


def forget(path: Path, urls: Sequence[str], *, as_json: bool) -> None:
    """Forget relays."""
    unknown = 0
    with _opened(path) as file:
        for url in urls:
            was_known = file.forget(url)
            unknown += not was_known
            if as_json:
                output.write_record({"url": url, "forgotten": was_known})
            else:
                output.write_line(f"{'forgotten' if was_known else 'not known'}: {output.harmless(url)}")
    raise typer.Exit(1 if unknown else 0)


def probe(path: Path, urls: Sequence[str], *, count: int, timeout: float, as_json: bool) -> None:
    """Measure relays, all at the same time."""
    try:
        for url in urls:  # they are remembered
            check_url(url)
    except ConnectionFailed as error:
        output.misuse(error)
    with _opened(path) as file:
        asked = list(dict.fromkeys(urls)) or [relay.url for relay in file.relays()]
        if not asked:
            output.misuse("no relays are known yet; name one, or add one with: strata relays add URL")
        run(_probe_all(file, asked, count=count, timeout=timeout, as_json=as_json))


async def _probe_all(
    file: ScoreFile, urls: Sequence[str], *, count: int, timeout: float, as_json: bool
) -> int:
    with output.ProgressBar("probing", len(urls) * (count + 1)) as progress:
        async with asyncio.TaskGroup() as tasks:
            probes = [
                tasks.create_task(_probe(url, count, timeout, progress), name="strata-probe") for url in urls
            ]
    failed = 0
    if not as_json:
        output.write_line(_COLUMNS)
    for url, work in zip(urls, probes, strict=True):
        observations, problem = work.result()
        failed += problem is not None
        if problem is not None:
            output.note(f"error: {problem}")
        file.add(url, time.time())
        file.write(observations, [], time.time())
        saved, score = _current(file, url)
        file.write([], [(url, saved, score)], time.time())
        _write(url, saved, score, as_json=as_json)
    return 1 if failed else 0


async def _probe(
    url: str, count: int, timeout: float, progress: output.ProgressBar
) -> tuple[list[Observation], StrataError | None]:
    """Connect and make `count` requests with empty answers. Returns observations, and the error if any."""
    trips: list[float] = []
    failures = 0
    try:
        async with connect(url, options=Options(connect_timeout=timeout)) as relay:
            progress.advance()
            marks = relay.announced is not None and "history_marker" in relay.announced.extensions
            for _ in range(count):
                try:
                    trips.append(await round_trip(relay, timeout))
                except (StrataError, TimeoutError):
                    failures += 1
                finally:
                    progress.advance()
    except StrataError as error:
        return [Observation(url, time.time(), Aspect.CONNECT, bad=1)], error
    # A plain relay ends its history by silence, and the length of a silence is not a latency.
    mean = sum(trips) / len(trips) if trips and marks else None
    return [
        Observation(url, time.time(), Aspect.CONNECT, good=1),
        Observation(url, time.time(), Aspect.PING, len(trips), failures, mean),
    ], None


@contextmanager
def _opened(path: Path) -> Iterator[ScoreFile]:
    """The scores file. Ends the command with an error message if the file is unusable."""
    try:
        with ScoreFile(path) as file:
            yield file
    except BrokenPipeError:
        raise  # the reader of stdout has gone away, which is not an error to report
    except OSError as error:
        output.fail(error)


def _current(file: ScoreFile, url: str) -> tuple[Saved, Score]:
    """The score of a relay now, since a score changes as observations grow old."""
    now = time.time()
    reputation = Reputation()
    saved = next((relay.saved for relay in file.relays() if relay.url == url), reputation.saved(url))
    observations = file.observations(now - WINDOW_SECONDS)
    reputation.restore(url, saved, (one for one in observations if one.url == url))
    reputation.judge(url, now)
    return reputation.saved(url), reputation.score(url, now)


def _agreed(relay: str, *, yes: bool) -> str:
    """The WebSocket URL of a relay. The relay of a relay URI is shown first and needs consent (R-402)."""
    if not uris.is_relay_uri(relay):
        return relay
    proposal = uris.parse(relay)
    output.note(f"this proposes the relay {output.harmless(proposal.ws)}")
    for warning in proposal.warnings:
        output.note(f"warning: {warning}")
    if not yes and not (sys.stdin.isatty() and typer.confirm("Add it?", err=True)):
        output.fail("not added; say --yes to agree")
    return proposal.ws


def _write(url: str, saved: Saved, score: Score, *, as_json: bool) -> None:
    if as_json:
        output.write_record(_record(url, saved, score))
        return
    latency = "-" if score.latency is None else f"{score.latency * 1000:.1f} ms"
    uptime = "-" if score.uptime is None else f"{score.uptime:.0%}"
    seen = "never"
    if saved.last_seen_at is not None:
        seen = output.utc(saved.last_seen_at)
    line = f"{saved.standing.value:<12}{score.value:>6.2f}  {latency:>9}  {uptime:>6}  {seen:<20}  {url}"
    output.write_line(output.harmless(line))


def _record(url: str, saved: Saved, score: Score) -> dict[str, object]:
    return {
        "url": url,
        "state": saved.standing.value,
        "score": round(score.value, 4),
        "latency": score.latency,
        "throughput": score.throughput,
        "uptime": score.uptime,
        "last_seen_at": saved.last_seen_at,
        "blacklisted_until": saved.blacklisted_until,
    }
