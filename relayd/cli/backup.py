"""The commands `relayd backup create`, `follow`, `verify` and `restore`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relayd.cli import console
from relayd.cli.arguments import ConfigFile, DataDirInUse, Json
from relayd.config import Settings
from relayd.exit_codes import EXIT_INCOMPLETE

if TYPE_CHECKING:
    from relayd.backups import Drilled

__all__ = ["backups"]

backups = typer.Typer(no_args_is_help=True, help="Make, check and put back backups of the database.")

_DatabaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="The PostgreSQL to copy; its role needs REPLICATION.")
]
_Backup = Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of the backup.")]


@backups.command()
def create(
    backup: _Backup,
    config: ConfigFile = None,
    database_url: _DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Copy the whole server with pg_basebackup.

    The relay keeps running. pg_verifybackup then checks every file.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    head = console.run(_create(settings, backup))
    if json:
        console.print_json({"backup": str(backup), "head": head})
    else:
        typer.echo(f"{backup} has the log up to sequence {head} at least")


@backups.command()
def follow(
    backup: _Backup,
    config: ConfigFile = None,
    database_url: _DatabaseUrl = None,
    data_dir: DataDirInUse = None,
) -> None:
    """Write the server's WAL into a backup until SIGINT.

    Any moment since the backup can then be restored. Run it as a service, and start it right after
    `create`: if WAL in between is missing, it exits with 3, and you need a new backup.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    console.run(_follow(settings, backup))


@backups.command()
def verify(
    backup: _Backup,
    config: ConfigFile = None,
    database_url: _DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Drill: start a copy of a backup and count.

    It counts every place of the log and recomputes every packet's id. If the live database can be
    reached, it also reports how many packets that has beyond the backup. Exit code 1 if anything that was
    acknowledged before the backup is missing.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    _tell(console.run(_drill(settings, backup)), json)


@backups.command()
def restore(
    backup: _Backup,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the files and count the log as well.")
    ] = False,
    until: Annotated[
        datetime | None,
        typer.Option(
            "--until",
            metavar="TIME",
            formats=["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%fZ"],
            help="The moment to stop at, such as 2026-11-26T21:00:00Z, of a backup that was followed."
            " Default: the last.",
        ),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Put a backup into an empty data folder.

    The log begins a new epoch there, so that readers who had come further are told. Exit code 1 if
    anything that was acknowledged before the backup is missing.
    """
    from relayd.backups import restore as put_back

    settings = console.read_settings(config, data_dir=data_dir)
    moment = None if until is None else until.replace(tzinfo=UTC)
    found = console.run(put_back(backup, settings.data_dir, verify=verify, until=moment))
    if found is not None:
        _tell(found, json)
    elif json:
        console.print_json({"data_dir": str(settings.data_dir)})
    else:
        typer.echo(f"{settings.data_dir} has the backup")


def _tell(found: Drilled, json: bool) -> None:
    if json:
        console.print_json({**dataclasses.asdict(found), "is_whole": found.is_whole})
    else:
        typer.echo(f"{found.packets} packets up to sequence {found.head}, {found.erased} erased")
        typer.echo(f"{found.missing} places without a packet, {found.damaged} packets damaged")
        if found.short_of_record:
            typer.echo("the log ends before the place that it had reached when the backup began")
        if found.behind is not None:
            typer.echo(f"the live database has {found.behind} packets beyond it")
    if not found.is_whole:
        raise typer.Exit(EXIT_INCOMPLETE)


async def _create(settings: Settings, backup: Path) -> int:
    from relayd.backups import create
    from relayd.database import require_database, running_url
    from relayd.postgres import EmbeddedPostgres

    require_database(settings)
    data_dir = settings.data_dir if settings.database_url is None else None
    async with running_url(settings) as url:
        if url is not None:
            return await create(url, backup, data_dir=data_dir)
        async with EmbeddedPostgres(settings.data_dir) as server:
            return await create(server.url, backup, data_dir=data_dir)


async def _follow(settings: Settings, backup: Path) -> None:
    from relayd.backups import BackupFailed, follow
    from relayd.database import running_url

    async with running_url(settings) as url:
        if url is None:
            raise BackupFailed(f"no relay runs on {settings.data_dir}: there is nothing to follow")
        with contextlib.suppress(asyncio.CancelledError):  # SIGTERM or SIGINT: a service's normal end
            await follow(url, backup)


async def _drill(settings: Settings, backup: Path) -> Drilled:
    from relayd.backups import drill
    from relayd.database import running_url

    async with running_url(settings) as url:
        return await drill(backup, live_url=url)
