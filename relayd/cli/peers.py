"""The commands `relayd peers …`: the relays that this one reads from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from strata.protocol.times import moment

from relayd.cli import console
from relayd.cli.arguments import ConfigFile, DatabaseUrl, DataDirInUse, Json
from relayd.config import Settings
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_INCOMPLETE

if TYPE_CHECKING:
    from relayd.federation.checking import PeerCheck

__all__ = ["peers"]

_ROWS: Final = (
    ("there, and missing here", "need"),
    ("  brought", "brought"),
    ("  refused by this relay", "refused"),
    ("  not sent by the peer", "withheld"),
    ("  not requested, because many were refused", "unfetched"),
    ("there, and here before (erased, banned, just come)", "known"),
    ("here, and found anew not to be served there", "have"),
)

peers = typer.Typer(no_args_is_help=True, help="See and steer the relays that this one reads from.")
_PeerId = Annotated[str, typer.Argument(metavar="DID", help="The peer's DID, or the beginning of it.")]


@peers.command("list")
def peers_list(
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Show how each peer stands.

    The relay no longer reads from a peer that is in the table and not in `peers_file`.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.federation.overview import peer_line, peer_rows

    found = console.run(peer_rows(settings))
    if json:
        console.print_json({"peers": found})
    for row in () if json else found:
        typer.echo(peer_line(row))


@peers.command("pause")
def peers_pause(
    peer: _PeerId, config: ConfigFile = None, database_url: DatabaseUrl = None, data_dir: DataDirInUse = None
) -> None:
    """Stop reading from a peer until `resume`.

    The running relay stops within some seconds.
    """
    _change_peer(config, database_url, data_dir, peer, "pause")


@peers.command("resume")
def peers_resume(
    peer: _PeerId, config: ConfigFile = None, database_url: DatabaseUrl = None, data_dir: DataDirInUse = None
) -> None:
    """Resume reading from a paused peer, where reading stopped."""
    _change_peer(config, database_url, data_dir, peer, "resume")


@peers.command("forgive")
def peers_forgive(
    peer: _PeerId, config: ConfigFile = None, database_url: DatabaseUrl = None, data_dir: DataDirInUse = None
) -> None:
    """Forget the offences of a peer, and read from it again."""
    _change_peer(config, database_url, data_dir, peer, "forgive")


@peers.command("reset-cursor")
def peers_reset_cursor(
    peer: _PeerId, config: ConfigFile = None, database_url: DatabaseUrl = None, data_dir: DataDirInUse = None
) -> None:
    """Read a peer's log again from its beginning.

    Packets that this relay already has are not stored again.
    """
    _change_peer(config, database_url, data_dir, peer, "reset-cursor")


@peers.command("check")
def peers_check(
    peer: Annotated[str | None, typer.Argument(metavar="DID", help="One peer; by default all.")] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Reach each peer, and say what it grants and how far behind this relay is.

    Exit code 1 if there is a problem with one.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.federation.checking import check_peers

    found = console.run(check_peers(settings, peer))
    if json:
        console.print_json({"peers": found})
    for each in () if json else found:
        typer.echo(_checked(each))
    if any(each["problem"] for each in found):
        raise typer.Exit(EXIT_INCOMPLETE)


@peers.command("show")
def peers_show(
    peer: _PeerId,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Show all that is known of a peer: its standing, what was refused, the last comparison."""
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.federation.checking import peer_details

    found = console.run(peer_details(settings, peer))
    if json:
        console.print_json(found)
        return
    for name, value in found.items():
        match name, value:
            case "refused", dict():
                for reason, count in value.items():
                    typer.echo(f"refused: {count} {reason}")
            case "noted", dict():
                for kind, counts in value.items():
                    typer.echo(f"noted: {kind} {counts}")
            case "compared", None:
                typer.echo("never compared")
            case "compared", dict():
                typer.echo(_compared(value))
            case _, None | [] | "":
                pass
            case _:
                typer.echo(f"{name}: {value}")


@peers.command("reconcile")
def peers_reconcile(
    peer: _PeerId,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Compare packets from then on: 12h, 7d, a date (UTC); by default all that may count.",
        ),
    ] = None,
    config: ConfigFile = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDirInUse = None,
    json: Json = False,
) -> None:
    """Have the running relay compare what it has with a peer, and bring what is missing.

    Exit code 1 if the comparison did not finish. Stopping the command does not stop the relay.
    """
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    try:
        begin = None if since is None else moment(since, time.time())
    except ValueError as error:
        console.fail(EXIT_CONFIGURATION, f"--since: {error}")
    from relayd.federation.comparing import SETTLED_SECONDS

    if begin is not None and begin > time.time() - SETTLED_SECONDS:  # two empty sets would be equal
        problem = f"packets younger than {SETTLED_SECONDS} seconds may be on their way, and are not compared"
        console.fail(EXIT_CONFIGURATION, f"--since {since}: {problem}")
    found = console.run(_followed(settings, peer, begin, quiet=json))
    if json:
        console.print_json(found)
    else:
        typer.echo(_compared(found))
    if found.get("problem") or found.get("is_cut") or found.get("unfetched"):
        raise typer.Exit(EXIT_INCOMPLETE)


def _change_peer(
    config: Path | None, database_url: str | None, data_dir: Path | None, peer: str, action: str
) -> None:
    settings = console.read_settings(config, database_url=database_url, data_dir=data_dir)
    from relayd.federation.overview import change_peer

    typer.echo(f"{action}: {console.run(change_peer(settings, peer, action))}")


async def _followed(settings: Settings, peer: str, since: int | None, *, quiet: bool) -> dict[str, object]:
    from relayd.federation.checking import ask_comparison

    last: dict[str, object] = {}
    async for last in ask_comparison(settings, peer, since):
        if not quiet and not last["done"]:
            typer.echo(
                f"{last.get('items', 0)} packets compared in {last.get('parts', 0)} parts,"
                f" {last.get('brought', 0)} brought",
                err=True,
            )
    return last


def _compared(found: Mapping[str, object]) -> str:
    from relayd.federation.comparing import ComparisonResult

    def at(moment: int) -> str:
        return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")

    result = msgspec.convert(found, ComparisonResult)
    lines = [f"compared from {at(result.since)} to {at(result.until)}: {result.items} packets here"]
    lines += [f"  {getattr(result, name):>8}  {text}" for text, name in _ROWS]
    lines.append(f"{result.rounds} rounds, {result.bytes} bytes, {result.parts} parts")
    if result.is_cut or result.unfetched:
        lines.append("there is more that is missing: compare again")
    if result.problem:
        lines.append(f"not to the end: {result.problem}")
    return "\n".join(lines)


def _checked(found: PeerCheck) -> str:
    if not found["reached"]:
        return f"{found['relay_id']}  {found['url']}  not reached: {found['problem']}"
    behind = found["behind_seconds"]
    parts = [
        f"{found['relay_id']}  {found['url']}",
        f"grants {', '.join(found['grants']) or 'nothing'}",
        "compares sets" if "reconcile" in found["extensions"] else "compares no sets",
        "clock unknown" if found["clock_ahead"] is None else f"clock {found['clock_ahead']:+d} s",
        "nothing read yet" if behind is None else f"{behind} s behind",
    ]
    if found["problem"]:
        parts.append(f"({found['problem']})")
    return "  ".join(parts)
