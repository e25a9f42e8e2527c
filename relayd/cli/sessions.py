"""The commands `relayd sessions …`: list the sessions of every process on the database, and end a session."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from relayd.cli import console
from relayd.cli.arguments import ConfigFile, DatabaseUrl, DataDirInUse, Json
from relayd.cli.moderate import actor_of, opened_store, time_text
from relayd.config import Settings
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_DATABASE, EXIT_INCOMPLETE
from relayd.moderation import SubjectKind, check_reason, kind_of
from relayd.roll import OpenSession, Question, Roll

__all__ = ["sessions"]

sessions = typer.Typer(no_args_is_help=True, help="See who is connected, and end a session.")


@sessions.command("list")
def sessions_list(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Only those of this DID, address or network.")
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """List the open sessions of every process on the database.

    Exit code 1 if a process did not answer: its sessions are missing from the list.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    kind = None if subject is None else kind_of(subject)
    if subject is not None and kind is None:
        console.fail(EXIT_CONFIGURATION, f"{subject} is neither a DID nor a network")
    question = Question(
        identity=subject if kind is SubjectKind.AUTHOR else None,
        network=subject if kind is SubjectKind.NETWORK else None,
    )
    found, silent = console.run(_all(settings, question))
    if json:
        console.print_json([msgspec.structs.asdict(each) for each in found])
    else:
        for each in found:
            typer.echo(_line(each))
    if silent:
        typer.echo(f"{silent} processes gave no answer", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)


@sessions.command("close")
def sessions_close(
    session: Annotated[str, typer.Argument(metavar="ID", help="As `relayd sessions list` prints it.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log of rulings.")
    ],
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="NAME", help="Who decided; by default the name of the system's user."),
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """End a session within two seconds, whichever process has it.

    Its client may come back: `relayd ban` keeps it out. Exit code 1 if there is no such session.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    try:
        question, why, actor = Question(session=session), check_reason(reason), actor_of(by)
    except ValueError as error:
        console.fail(EXIT_CONFIGURATION, error)
    roll = console.run(_close(settings, question, why, actor))
    if roll.silent:
        console.fail(EXIT_DATABASE, "the process of that session does not answer now")
    changed = bool(roll.sessions)
    if json:
        console.print_json({"session": session, "changed": changed})
    else:
        typer.echo(f"{'closed' if changed else 'not open:'} session {session}")
    if not changed:
        raise typer.Exit(EXIT_INCOMPLETE)


async def _all(settings: Settings, question: Question) -> tuple[list[OpenSession], int]:
    found: list[OpenSession] = []
    async with opened_store(settings) as store:
        while True:
            roll = await store.roll.ask(question)
            found += roll.sessions
            if roll.next is None:
                return found, roll.silent
            question = msgspec.structs.replace(question, after=roll.next)


async def _close(settings: Settings, question: Question, reason: str, actor: str) -> Roll:
    async with opened_store(settings) as store:
        roll = await store.roll.ask(question)
        for session in roll.sessions:
            await store.moderation.close(
                session, reason=reason, actor=actor, via="command", now=int(time.time())
            )
        return roll


def _line(session: OpenSession) -> str:
    who = session.identity or "-"
    counts = f"{session.subscriptions} open, {session.publishes} in, {session.events} out"
    return f"{session.id}  since {time_text(session.opened_at)}  {session.address or '-'}  {who}  {counts}"
