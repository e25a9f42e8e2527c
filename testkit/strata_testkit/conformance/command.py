"""`strata conformance`: judge a relay from outside and print the verdicts.

Exit codes: 0 every MUST that could be judged holds, 1 one does not, 2 usage, 3 no relay answers there.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity
from strata.relays.connection.dialing import describe, shown, tls_context
from strata.relays.connection.pins import PinFile
from strata.tools.cli import output
from strata.tools.cli.options import expanded
from strata.tools.cli.running import run
from strata.tools.cli.target import is_on_this_machine, require_relay_url
from websockets.exceptions import WebSocketException

from strata_testkit.conformance import report
from strata_testkit.conformance.checks import all_checks
from strata_testkit.conformance.context import LIFETIME_SECONDS, Context, survey
from strata_testkit.conformance.coverage import UNSEEN
from strata_testkit.conformance.model import Check, Keyword, Result
from strata_testkit.conformance.runner import Selection, run_checks
from strata_testkit.conformance.verdicts import Failed, Skipped

__all__ = ["UNREACHABLE", "ConformanceRequest", "conformance", "list_checks"]

UNREACHABLE = 3
_FAILED = 1
_PAPER_COLUMNS = 160
_PATTERN = re.compile(r"[A-Za-z0-9*?\[\]-]+")


@dataclass(frozen=True, slots=True)
class ConformanceRequest:
    """The options of the command line. Times are in seconds."""

    url: str
    only: tuple[str, ...] = ()
    level: Keyword = Keyword.MAY
    limits: bool = False
    identity: Path | None = None
    pins: Path | None = None
    concurrency: int = 8
    timeout: float = 300.0
    yes: bool = False
    as_json: bool = False

    def selected(self) -> list[Check]:
        """The selected checks. Ends the command with exit code 2 if there are none."""
        patterns = tuple(part for item in self.only for part in item.split(",") if part)
        if any(_PATTERN.fullmatch(pattern) is None for pattern in patterns):
            output.misuse("--only takes rows and names of checks, such as R-152,R-1*,pages-*")
        checks = Selection(patterns, self.level, self.limits).of(all_checks())
        if not checks:
            output.misuse("no check fits; see them with: strata conformance --list")
        return checks


def list_checks(request: ConformanceRequest) -> None:
    """Print the checks that would run."""
    checks = request.selected()
    if request.as_json:
        for check in checks:
            output.write_record(report.check_record(check))
    else:
        report.write_list(checks, _console())
        report.write_unseen(UNSEEN, _console())


def conformance(request: ConformanceRequest) -> None:
    """Run the selected checks against a relay and print the results."""
    checks = request.selected()
    require_relay_url(request.url)
    identity = _load_identity(request.identity)
    _announce(request, len(checks))
    run(_conformance(request, checks, identity))


async def _conformance(
    request: ConformanceRequest, checks: Sequence[Check], identity: Identity | None
) -> int:
    started_at = time.monotonic()
    pins = None if identity is None or request.pins is None else PinFile(request.pins)
    relay_id, met = (None, {}) if pins is None else (pins.get(request.url), pins.met())
    try:
        context = await survey(
            request.url, identity=identity, relay_id=relay_id, met=met, ssl=tls_context(request.url, None)
        )
    except (WebSocketException, OSError) as error:
        output.note(f"error: {describe(error, request.url)}")
        return UNREACHABLE
    except (Skipped, Failed) as error:
        output.note(f"error: {output.harmless(str(error))}")
        return _FAILED
    if pins is not None and context.relay_id is not None:
        pins.add(request.url, context.relay_id)
    results = await _run(request, checks, context)
    summary = report.summarise(results, time.monotonic() - started_at)
    if request.as_json:
        output.write_record(report.summary_record(summary, shown(request.url)))
    else:
        report.write_table(results, summary, _console())
    return 0 if summary.conforms else _FAILED


async def _run(request: ConformanceRequest, checks: Sequence[Check], context: Context) -> list[Result]:
    progress = output.ProgressBar("checking", len(checks))

    def done(result: Result) -> None:
        progress.advance()
        if request.as_json:
            output.write_record(report.record(result))

    with progress:
        return await run_checks(
            checks, context, concurrency=request.concurrency, timeout=request.timeout, report=done
        )


def _announce(request: ConformanceRequest, count: int) -> None:
    """Say what is about to happen; ask for consent if the relay is on another machine."""
    burden = "thousands of packets" if request.limits else "about 1500 small packets"
    output.note(
        f"{count} checks of {shown(request.url)}: they publish {burden}, under throw-away identities, "
        f"that expire within {LIFETIME_SECONDS // 60} minutes."
    )
    if request.yes or is_on_this_machine(request.url):
        return
    if not sys.stdin.isatty():
        output.misuse("this relay is not on this machine: add --yes to publish to it")
    if not typer.confirm("Go on?", err=True):
        raise typer.Exit(output.USAGE)


def _load_identity(path: Path | None) -> Identity | None:
    if path is None:
        return None
    try:
        return Identity.load(expanded(path))
    except (StrataError, OSError) as error:
        output.misuse(error)


def _console() -> Console:
    """A console on standard output, wide enough for the table if stdout is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PAPER_COLUMNS)
