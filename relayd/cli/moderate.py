"""The commands of moderation: `relayd ban`, `unban`, `remove`, `restore`, `erase`, `list`, `log`.

Each talks to the database and to no process: every relay on it follows within two seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from strata.protocol.times import duration

from relayd.cli import console
from relayd.cli.arguments import ConfigFile, DatabaseUrl, DataDirInUse, Json
from relayd.cli.places import read_places, tell_places
from relayd.config import Settings
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_INCOMPLETE
from relayd.moderation import Act, Ban, Ruled, SubjectKind, check_reason, kind_of, subject_of

if TYPE_CHECKING:
    from relayd.store import Store
    from relayd.store.erasing import Erased
    from relayd.store.places import PlacesErased

__all__ = ["actor_of", "opened_store", "rulings", "time_text"]

rulings = typer.Typer()
"""The commands of moderation, which stand among the relay's own."""

_PAGE: Final = 1000
_SHOWN: Final = 50
"""The number of rulings shown to a person by default."""
_TOLD: Final = 78
"""The most characters of a reason in one line."""

_Kind = Annotated[
    SubjectKind | None,
    typer.Option("--kind", help="What the subject is; needed only for media hashes and types."),
]
_Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log and shown to operators.")
]
_By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who decided; by default the name of the system's user."),
]
_For = Annotated[
    str | None,
    typer.Option(
        "--for", metavar="TIME", help="How long it holds: 90s, 30m, 12h, 7d, 2w. Default: permanently."
    ),
]


@rulings.command()
def ban(
    subjects: Annotated[
        list[str],
        typer.Argument(metavar="SUBJECT", help="A DID, an address or network, a media hash or a type."),
    ],
    reason: _Reason,
    kind: _Kind = None,
    lasting: _For = None,
    by: _By = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Ban authors, networks, media hashes or types.

    The relay accepts and serves no packet of a banned author, and ends the author's sessions. It serves
    nobody at a banned address. Stored packets stay stored. Every process on the database follows within
    two seconds.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    wanted = _subjects(subjects, kind)
    _rule(settings, wanted, reason, by, lasting=lasting, json=json)


@rulings.command()
def unban(
    subjects: Annotated[
        list[str],
        typer.Argument(metavar="SUBJECT", help="The subjects, written as when they were banned."),
    ],
    reason: _Reason = "lifted",
    kind: _Kind = None,
    by: _By = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Lift bans. Exit code 1 if one of the subjects was not banned."""
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    wanted = _subjects(subjects, kind)
    _rule(settings, wanted, reason, by, bans=False, json=json)


@rulings.command()
def remove(
    packet_ids: Annotated[list[str], typer.Argument(metavar="PACKET_ID", help="The packets to hide.")],
    reason: _Reason,
    lasting: _For = None,
    by: _By = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Hide packets on every path.

    They need not have arrived yet. The log keeps them, so `relayd restore` brings them back.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    wanted = _subjects(packet_ids, SubjectKind.PACKET)
    _rule(settings, wanted, reason, by, lasting=lasting, json=json)


@rulings.command()
def restore(
    packet_ids: Annotated[list[str], typer.Argument(metavar="PACKET_ID", help="The packets to show.")],
    reason: _Reason = "restored",
    by: _By = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Show packets again that were removed. Exit code 1 if one of them was not removed."""
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    wanted = _subjects(packet_ids, SubjectKind.PACKET)
    _rule(settings, wanted, reason, by, bans=False, json=json)


@rulings.command()
def erase(
    packet_ids: Annotated[
        list[str] | None, typer.Argument(metavar="PACKET_ID", help="The packets to erase.")
    ] = None,
    reason: Annotated[
        str,
        typer.Option("--reason", metavar="TEXT", help="Why; it stays in the log, so put no names into it."),
    ] = "",
    authors: Annotated[
        list[str] | None,
        typer.Option("--author", metavar="DID", help="Erase all packets of this author; may repeat."),
    ] = None,
    places: Annotated[
        str | None,
        typer.Option(
            "--places",
            metavar="FILE",
            help="Erase the packets in this output of strata-pipeline find (- for stdin), even if"
            " retention has dropped them.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --places: change nothing, and say what would be done.")
    ] = False,
    by: _By = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Erase packets permanently.

    Their content and their author disappear from the log; a signed tombstone keeps each place. Packets
    that carry keys or revoke them stay. If it is interrupted, run it again to finish. Exit code 1 if some
    packets were not there or stay. A packet of a day that retention has dropped may still be in a lake:
    with --places it gets a tombstone, so that strata-pipeline erase can remove it there.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    if [bool(packet_ids), bool(authors), places is not None].count(True) != 1:
        console.fail(EXIT_CONFIGURATION, "name packets, or authors with --author, or a file with --places")
    if dry_run and places is None:
        console.fail(EXIT_CONFIGURATION, "--dry-run needs --places")
    if places is not None:
        _erase_places(settings, places, reason, by, dry_run=dry_run, json=json)
        return
    kind = SubjectKind.AUTHOR if authors else SubjectKind.PACKET
    wanted = [subject for _, subject in _subjects(authors or packet_ids or [], kind)]
    try:
        why, actor = check_reason(reason), actor_of(by)
    except ValueError as error:
        console.fail(EXIT_CONFIGURATION, error)
    done = console.run(_erase(settings, kind, wanted, why, actor))
    absent = len(set(wanted)) - done.packets - done.spared if kind is SubjectKind.PACKET else 0
    if json:
        console.print_json({"erased": done.packets, "spared": done.spared, "absent": absent})
    else:
        typer.echo(_erased(done, absent))
    if settings.archive_manifests is not None and done.packets:
        typer.echo("the lake is not erased by this: see docs/guides/moderation.md", err=True)
    if absent or (done.spared and kind is SubjectKind.PACKET):
        raise typer.Exit(EXIT_INCOMPLETE)


def _erased(done: Erased, absent: int) -> str:
    lines = [f"{done.packets} packets erased"]
    if done.spared:
        lines.append(f"{done.spared} stay: they carry keys, or revoke them")
    if absent:
        lines.append(
            f"{absent} are not in the log, or were erased before; retention may have dropped them:"
            " then strata-pipeline find names their places for --places"
        )
    return "\n".join(lines)


@rulings.command("list")
def list_(
    kind: Annotated[SubjectKind | None, typer.Option("--kind", help="Only these.")] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """List bans in force and removed packets."""
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    bans = console.run(_bans(settings, kind))
    if json:
        console.print_json([entry._asdict() for entry in bans])
        return
    for entry in bans:
        typer.echo(f"{_ban_text(entry)}  by {entry.actor}: {_short(entry.reason)}")


@rulings.command()
def log(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Only rulings about this subject.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            max=100_000,
            metavar="N",
            help="The newest N. Default: 50, and all with --json.",
        ),
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Show the log of rulings: who, what and why.

    The newest comes first. --json shows the state before and after.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    if json:
        lines = console.run(_ruled(settings, subject, limit))
        console.print_json([_ruled_plain(line) for line in lines])
        return
    shown = limit or _SHOWN
    lines = console.run(_ruled(settings, subject, shown + 1))
    for line in lines[:shown]:
        until = "" if line.after is None else _until(line.after.expires_at)
        typer.echo(
            f"{line.number}  {time_text(line.at)}  {line.actor} ({line.via})"
            f"  {_word(line.act, line.kind)} {line.kind} {line.subject}{until}: {_short(line.reason)}"
        )
    if lines[shown:]:
        typer.echo("older rulings are left out: --limit N shows more", err=True)


def _rule(
    settings: Settings,
    wanted: list[tuple[SubjectKind, str]],
    reason: str,
    by: str | None,
    *,
    bans: bool = True,
    lasting: str | None = None,
    json: bool,
) -> None:
    from relayd.store.moderation import Ruling

    now = int(time.time())
    try:
        expires_at = None if lasting is None else now + duration(lasting)
        reason, actor = check_reason(reason), actor_of(by)
    except ValueError as error:
        console.fail(EXIT_CONFIGURATION, error)
    rulings = [Ruling(*each, bans, reason, actor, "command", expires_at) for each in wanted]

    async def run() -> list[bool]:
        async with opened_store(settings) as store:
            return await store.moderation.rule(rulings, now)

    changed = console.run(run())
    if json:
        told = [
            {"kind": kind, "subject": subject, "changed": did}
            for (kind, subject), did in zip(wanted, changed, strict=True)
        ]
        console.print_json(told)
    else:
        for (kind, subject), did in zip(wanted, changed, strict=True):
            unchanged = _UNCHANGED[bans, kind is SubjectKind.PACKET]
            word = _word(Act.BAN if bans else Act.UNBAN, kind) if did else unchanged
            until = _until(expires_at) if bans else ""
            typer.echo(f"{word} {kind} {subject}{until}")
    if not bans and not all(changed):
        raise typer.Exit(EXIT_INCOMPLETE)


_UNCHANGED: Final = {
    (True, False): "already banned:",
    (True, True): "already removed:",
    (False, False): "was not banned:",
    (False, True): "was not removed:",
}


def _subjects(texts: list[str], kind: SubjectKind | None) -> list[tuple[SubjectKind, str]]:
    found = []
    try:
        for text in texts:
            which = kind or kind_of(text)
            if which is None:
                raise ValueError(
                    f"{text} is neither a DID nor a network: say --kind media or --kind type,"
                    " or use `relayd remove` for a packet"
                )
            found.append((which, subject_of(which, text)))
    except ValueError as error:
        console.fail(EXIT_CONFIGURATION, error)
    return found


@contextlib.asynccontextmanager
async def opened_store(settings: Settings) -> AsyncIterator[Store]:
    """The store, even while a relay runs on its embedded PostgreSQL. Raises `StoreError`."""
    from relayd.database import require_database, running_url
    from relayd.transfer.files import open_store

    require_database(settings)
    async with (
        running_url(settings) as url,
        open_store(dataclasses.replace(settings, database_url=url)) as store,
    ):
        yield store


async def _bans(settings: Settings, kind: SubjectKind | None) -> list[Ban]:
    now, found, after = int(time.time()), list[Ban](), ("", "")
    async with opened_store(settings) as store:
        while page := await store.moderation.bans(now, kind=kind, after=after, limit=_PAGE):
            found += page
            after = (found[-1].kind, found[-1].subject)
    return found


async def _erase(settings: Settings, kind: SubjectKind, wanted: list[str], reason: str, actor: str) -> Erased:
    from relayd.process.builder import relay_identity
    from relayd.store.erasing import Eraser

    async with opened_store(settings) as store:
        eraser = Eraser(store.url, relay_identity(settings, store))
        return await eraser.erase(
            kind, wanted, reason=reason, actor=actor, via="command", now=int(time.time())
        )


def _erase_places(
    settings: Settings, name: str, reason: str, by: str | None, *, dry_run: bool, json: bool
) -> None:
    from relayd.process.builder import relay_identity
    from relayd.store.places import PlaceEraser

    try:
        why, actor = "" if dry_run else check_reason(reason), actor_of(by)
        places = read_places(name)
    except (OSError, ValueError) as error:
        console.fail(EXIT_CONFIGURATION, error)

    async def run() -> PlacesErased:
        async with opened_store(settings) as store:
            eraser = PlaceEraser(store.url, relay_identity(settings, store))
            if dry_run:
                return await eraser.survey(places)
            now = int(time.time())
            return await eraser.erase(places, reason=why, actor=actor, via="command", now=now)

    done = console.run(run())
    tell_places(done, dry_run=dry_run, json=json)
    if (done.erased or done.dropped) and not dry_run:
        typer.echo("the lake is not erased by this: run strata-pipeline erase", err=True)
    if done.refused or done.spared:
        raise typer.Exit(EXIT_INCOMPLETE)


async def _ruled(settings: Settings, subject: str | None, limit: int | None) -> list[Ruled]:
    """The newest `limit` rulings, or all of them: an incomplete list would not show everything erased."""
    lines = list[Ruled]()
    async with opened_store(settings) as store:
        while limit is None or len(lines) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(lines))
            before = lines[-1].number if lines else None
            page = await store.moderation.log(before=before, subject=subject, limit=size)
            lines += page
            if len(page) < size:
                break
    return lines


def actor_of(by: str | None) -> str:
    """The actor to record in the moderation log. Raises ValueError."""
    name = by
    if name is None:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # a container's user may have no name
            name = f"uid {os.getuid()}"
    name = name.strip()
    if not name or len(name) > 300 or "\x00" in name:
        raise ValueError("--by takes a name of 1 to 300 characters")
    return name


def _word(act: Act | str, kind: SubjectKind | str) -> str:
    """What was done, in the past tense; unchanged if only a newer relayd knows it."""
    ban, unban = ("removed", "restored") if kind is SubjectKind.PACKET else ("banned", "unbanned")
    words = {Act.BAN: ban, Act.UNBAN: unban, Act.EXPIRE: unban, Act.ERASE: "erased", Act.CLOSE: "closed"}
    return words[act] if isinstance(act, Act) else act


def _ban_text(ban: Ban) -> str:
    return f"{ban.kind}  {ban.subject}  since {time_text(ban.created_at)}{_until(ban.expires_at)}"


def _until(expires_at: int | None) -> str:
    return "" if expires_at is None else f" until {time_text(expires_at)}"


def time_text(at: int) -> str:
    """A Unix second in a form for people."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return str(at)


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _TOLD else line[: _TOLD - 1] + "…"


def _ruled_plain(line: Ruled) -> dict[str, object]:
    return line._asdict() | {
        name: None if ban is None else ban._asdict()
        for name, ban in (("before", line.before), ("after", line.after))
    }
