"""The `relayd` command.

Exit codes: 0 done, 1 done except for what the output names, 2 usage or configuration, 3 database unreachable
or unsafe, 4 port taken, 130 and 143 stopped by Ctrl-C and SIGTERM, 141 the reader of stdout went away.
Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import typer
from strata.protocol.programs import run_program
from strata.protocol.sentences import sentence

from relayd.cli import console
from relayd.cli.arguments import ConfigFile, DatabaseUrl, DataDir, Json
from relayd.cli.backup import backups
from relayd.cli.moderate import opened_store, rulings, time_text
from relayd.cli.peers import peers
from relayd.cli.sessions import sessions
from relayd.config import ConfigurationError, Settings
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_DATABASE, EXIT_INCOMPLETE
from relayd.version import VERSION

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from relayd.transfer.files import ExportSummary, ImportSummary

# Each command imports what only it needs: `relayd check-config` loads no driver, `--help` no progress bar.

__all__ = ["app", "main"]


app = typer.Typer(
    name="relayd",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # they show locals: settings, and those hold secrets
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the command."""
    run_program(app, "relayd", says="relayd", install="pip install relayd")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """A relay for the Strata protocol, on PostgreSQL."""


@app.command()
def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(metavar="HOST", help="The address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="The port to listen on; 0 takes a free one.")
    ] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="How many processes share the port.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate chain (PEM).")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The private key of the certificate (PEM).")
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /metrics at this address and not at the port."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="The form of log lines: auto, json or console.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(metavar="LEVEL", help="The least severe level to log: debug, info, warning or error."),
    ] = None,
) -> None:
    """Run the relay until SIGTERM.

    One JSON line on stdout says when it accepts connections.
    """
    given = {name: value for name, value in locals().items() if name != "config"}
    from relayd.process.signals import hold_reloads

    hold_reloads()  # on SIGHUP from here on, what is read below is read again
    settings = console.read_settings(config, **given)
    from relayd.process.daemon import run

    raise typer.Exit(run(settings))


@app.command("check-config")
def check_config(config: ConfigFile = None, json: Json = False) -> None:
    """Print the settings in effect, or everything wrong with them.

    Secrets are masked.
    """
    from relayd.manual import toml_value
    from relayd.references import check_references

    settings = console.read_settings(config)
    try:  # the files and plug-ins that the settings name must also be there
        check_references(settings)
    except ConfigurationError as error:
        console.fail(EXIT_CONFIGURATION, *error.problems)
    for warning in settings.warnings:
        console.say(f"warning: {warning}")
    if json:
        console.print_json(_plain(settings))
        return
    for name, value in settings.shown().items():
        typer.echo(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}")


@app.command()
def migrate(config: ConfigFile = None, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Bring the database's schema up to this version.

    `serve` does the same when it starts.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.database import database
    from relayd.store.migrate import latest_revision

    async def run() -> None:
        async with database(settings):
            pass

    console.run(run())
    typer.echo(f"the schema is at revision {latest_revision()}")


@app.command()
def doctor(
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check everything that the relay needs, and give advice.

    It changes nothing.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.cli.doctor import Verdict, examine

    checks = console.run(examine(settings))
    problems = {check.name for check in checks if check.verdict is Verdict.PROBLEM}
    if json:
        console.print_json({"ok": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        marks = {Verdict.OK: "✓", Verdict.WARNING: "!", Verdict.PROBLEM: "✗"}
        for check in checks:
            typer.echo(f"{marks[check.verdict]} {check.name}: {check.found}")
            if check.advice:
                typer.echo(f"    → {check.advice}")
    if problems:
        raise typer.Exit(EXIT_DATABASE if problems & {"database", "schema"} else EXIT_CONFIGURATION)


@app.command()
def top(
    config: ConfigFile = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The relay's /metrics; by default that of the settings.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.5, max=86_400, metavar="SECONDS", help="Seconds between two looks.")
    ] = 2.0,
    json: Json = False,
) -> None:
    """Show what a running relay does, continuously.

    With --json, or if the output is not a terminal, it shows the figures once.
    """
    settings = console.read_settings(config)
    from relayd.cli.scraped import metrics_url
    from relayd.cli.top import figures, look, table

    url = url or metrics_url(settings)
    try:
        before = look(url)
        time.sleep(interval)
        found = figures(look(url), before)
        if json:
            console.print_json(found)
        elif not sys.stdout.isatty():
            typer.echo(table(found))
        else:
            from rich.live import Live

            with Live(table(found), auto_refresh=False) as screen:
                while True:
                    now = look(url)
                    screen.update(table(figures(now, before)), refresh=True)
                    before = now
                    time.sleep(interval)
    except (OSError, ValueError) as error:
        console.fail(EXIT_INCOMPLETE, f"{url}: {sentence(error)}; --url names a relay's /metrics")
    except KeyboardInterrupt:
        pass


@app.command()
def explain(
    filters: Annotated[
        str, typer.Argument(metavar="FILTER", help='The filters of a SUBSCRIBE: \'{"types": ["POST"]}\'.')
    ],
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show how the database answers a filter, by running it.

    It names the indexes, how many rows the page has and how many were read for it, the time, and the
    planner's estimate. A relay on the embedded PostgreSQL may be running.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.cli import explain as explaining
    from relayd.database import database_beside

    async def run() -> list[explaining.Explained]:
        query, limit = explaining.read_filter(filters, settings)
        async with database_beside(settings) as url:
            return await explaining.explain(url, query, limit, timeout=settings.read_timeout)

    found = console.run(run())
    if json:
        console.print_json([dataclasses.asdict(each) for each in found])
        return
    for number, each in enumerate(found):
        typer.echo(f"{'then' if number else 'first'} by {each.way}: {each.meaning}")
        typer.echo(f"  indexes: {', '.join(each.indexes) or 'none'}")
        typer.echo(f"  rows: {each.rows} of {each.looked_at} looked at, {each.blocks} blocks")
        typer.echo(f"  cost: {each.cost:g} estimated, {each.milliseconds:g} ms taken")
        for line in each.plan:
            typer.echo(f"    {line}")


@app.command("new-epoch")
def new_epoch(
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Declare that the log may have lost its end.

    Use it after a backup was restored on a machine that does not know how far the log had come. Readers
    beyond the end are told, and continue from the last good place; others notice nothing.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.store import Store
    from relayd.store.terms import Reset

    async def run() -> Reset:
        from relayd.database import database, require_database

        require_database(settings)
        async with database(settings) as url, await Store.open(url, allow_unsafe=True) as store:
            reset = await store.begin_epoch("operator")
            assert reset is not None
            return reset

    reset = console.run(run())
    if json:
        console.print_json(dataclasses.asdict(reset))
    else:
        typer.echo(f"epoch {reset.epoch} begins behind sequence {reset.good_to}")


@app.command("mend-times")
def mend_times(
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Mend the times that a clock gave that was ahead.

    Run it once the clock is right. A packet that is told as received in the future is then told as received
    when the next one was, or now. The order of the log stays as it is.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.store.mending import Mended

    async def run() -> Mended:
        async with opened_store(settings) as store:
            return await store.mend_times(int(time.time()))

    mended = console.run(run())
    if json:
        console.print_json(mended._asdict())
        return
    if mended.latest is None:
        typer.echo("no packet is told as received in the future")
        return
    typer.echo(f"mended {mended.packets} packets, told as received up to {time_text(mended.latest)}")
    if mended.identity_packets:
        typer.echo(f"{mended.identity_packets} of them decide about keys: restart the relay now if it runs")


@app.command("export")
def export_(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file, or continue it; by default stdout."
        ),
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Write the whole log as JSON lines.

    With --output, a second run on the same file continues where the first one stopped.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.database import require_database
    from relayd.transfer.files import export_log, open_store, resume_point

    async def run(show: Callable[[ExportSummary], None]) -> ExportSummary:
        require_database(settings)
        async with open_store(settings) as store:
            after = await resume_point(output, store) if output is not None else 0
            with _opened(output, "ab", sys.stdout.buffer) as file:
                summary = await export_log(store, file, after=after, progress=show)
                if output is not None:
                    os.fsync(file.fileno())
                return summary

    with _progress("export") as (bar, task):
        summary = console.run(run(lambda now: bar.update(task, description=f"{now.packets} packets")))
    _summarise(summary, json, to_stdout=output is not None)


@app.command("import")
def import_(
    source: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The export to read; by default stdin.")
    ] = None,
    quarantine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the refused lines to this file, with the reasons."),
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Append the valid packets of an export.

    Packets that are already in the log are skipped. Exit code 1 if any line was refused.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.transfer.examiner import Examiner
    from relayd.transfer.files import import_log, open_store

    async def run(show: Callable[[ImportSummary], None]) -> ImportSummary:
        with _opened(source, "rb", sys.stdin.buffer) as file, _maybe_opened(quarantine) as kept:
            async with open_store(settings) as store:
                examiner = Examiner.from_settings(settings, store)
                return await import_log(store, file, examiner, now=time.time, quarantine=kept, progress=show)

    size = None
    if source is not None:
        with contextlib.suppress(OSError):  # opening the file will report it
            size = source.stat().st_size
    with _progress("import", size) as (bar, task):
        summary = console.run(
            run(lambda now: bar.update(task, description=f"{now.lines} lines", completed=now.bytes_read))
        )
    _summarise(summary, json, to_stdout=True)
    if summary.quarantined:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command("dev-cert")
def dev_cert(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Host names besides localhost.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="The folder to write to.")] = Path(
        "certs"
    ),
) -> None:
    """Make a certificate for development.

    The output says how to use it. An existing file is never replaced.
    """
    from relayd.tls import write_dev_certificates

    try:
        made = write_dev_certificates(directory, tuple(names or ()))
    except (OSError, ValueError) as error:
        console.fail(EXIT_CONFIGURATION, error)
    typer.echo(f"relayd serve --tls-cert {made.cert} --tls-key {made.key}")
    typer.echo(f"SSL_CERT_FILE={made.ca}   # for clients: trusts this certificate and nothing else")


def _plain(settings: Settings) -> dict[str, object]:
    shown = settings.shown()
    return {name: str(value) if isinstance(value, Path) else value for name, value in shown.items()}


def _summarise(summary: ExportSummary | ImportSummary, json: bool, *, to_stdout: bool) -> None:
    """Print the totals of a transfer: on stdout, unless stdout carries the data."""
    values = {name: value for name, value in dataclasses.asdict(summary).items() if value != {}}
    text = msgspec.json.encode(values).decode() if json else ", ".join(f"{k} {v}" for k, v in values.items())
    typer.echo(text, err=not to_stdout)


app.add_typer(rulings)
app.add_typer(backups, name="backup")
app.add_typer(peers, name="peers")
app.add_typer(sessions, name="sessions")


@contextlib.contextmanager
def _opened(path: Path | None, mode: str, otherwise: BinaryIO) -> Iterator[BinaryIO]:
    if path is None:
        yield otherwise
        return
    with path.open(mode) as file:
        yield file  # type: ignore[misc]  # every mode used here is a binary one


@contextlib.contextmanager
def _maybe_opened(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    with path.open("ab") as file:
        yield file


@contextlib.contextmanager
def _progress(name: str, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on stderr, on a terminal only; it disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        yield bar, bar.add_task(name, total=total)
