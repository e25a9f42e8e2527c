"""`strata moderate`: rule over the wire what a relay serves, as one of its operators."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final, Literal, cast

import typer

from strata.tools.cli.options import (
    CONTEXT_SETTINGS,
    DEFAULT_IDENTITY,
    DEFAULT_RELAY,
    ContextOption,
    IdentityOption,
    JsonOption,
    RelayOption,
    TimeoutOption,
    YesOption,
    expanded,
)

__all__ = ["app"]

app = typer.Typer(
    name="moderate",
    help="Moderate a relay as its operator.\n\nBan authors, packets, media, types and networks.",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9})([smhdw])")
_COLUMNS: Final = (
    ("act", "kind", "subject", "actor", "reason"),
    ("id", "opened_at", "address", "identity", "subscriptions", "publishes", "events"),
)
_KINDS: Final = ("author", "packet", "media", "type", "network")

_Kind = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help="author, packet, media, type or network.")
]
_Subject = Annotated[
    str,
    typer.Argument(metavar="SUBJECT", help="A DID or network; with --kind a packet id, media hash or type."),
]


@app.command()
def ban(
    subject: _Subject,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.")],
    kind: _Kind = None,
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long: 90s, 30m, 12h, 7d, 2w.")
    ] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Ban a subject; of a packet, remove it."""
    expires_at = None if lasting is None else int(time.time()) + _seconds(lasting)
    _rule("ban", subject, kind, reason, expires_at, relay, identity, timeout, yes, json)


@app.command()
def unban(
    subject: _Subject,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.")] = "lifted",
    kind: _Kind = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Lift a ban; restore a packet.

    Exit code 1 if there was none.
    """
    _rule("unban", subject, kind, reason, None, relay, identity, timeout, yes, json)


@app.command("list")
def list_(
    kind: _Kind = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print the bans in force."""
    _print("list", kind, None, relay, identity, timeout, yes, json)


@app.command()
def log(
    subject: Annotated[str | None, typer.Argument(metavar="SUBJECT", help="Only about this.")] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print who ruled what and why, the newest first."""
    _print("log", None, subject, relay, identity, timeout, yes, json)


@app.command()
def sessions(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Only of this DID or network.")
    ] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print the open sessions of all processes."""
    kind = None if subject is None else _kind(None, subject)
    _print("sessions", kind, subject, relay, identity, timeout, yes, json)


@app.command()
def close(
    session: Annotated[str, typer.Argument(metavar="ID", help="As `sessions` prints it.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.")],
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Close a session; its client may come back.

    Exit code 1 if there was none.
    """
    _rule("close", session, "session", reason, None, relay, identity, timeout, yes, json)


def _rule(
    action: str,
    subject: str,
    kind: str | None,
    reason: str,
    expires_at: int | None,
    relay: str,
    identity: Path,
    timeout: float,
    yes: bool,
    as_json: bool,
) -> None:
    from strata.relays.moderating import ModeratedKind, Moderator
    from strata.tools.cli import output
    from strata.tools.cli.running import run
    from strata.tools.cli.target import load_identity, relay_url

    which = "session" if action == "close" else _kind(kind, subject)
    signer, url = load_identity(expanded(identity)), relay_url(relay, yes=yes)

    async def work() -> int:
        async with Moderator(url, signer, timeout=timeout) as moderator:
            if action == "close":
                changed = await moderator.close_session(subject, reason=reason)
            elif action == "ban":
                changed = await moderator.ban(
                    cast("ModeratedKind", which), subject, reason=reason, expires_at=expires_at
                )
            else:
                changed = await moderator.unban(cast("ModeratedKind", which), subject, reason=reason)
        if as_json:
            output.write_record({"action": action, "kind": which, "subject": subject, "changed": changed})
        else:
            done = {"ban": "banned", "unban": "unbanned", "close": "closed"}[action]
            word = done if changed else "nothing to change:"
            output.write_line(f"{word} {which} {output.harmless(subject)}")
        return 0 if changed or action == "ban" else 1

    run(work())


def _print(
    action: str,
    kind: str | None,
    subject: str | None,
    relay: str,
    identity: Path,
    timeout: float,
    yes: bool,
    as_json: bool,
) -> None:
    from strata.relays.moderating import ModeratedKind, Moderator
    from strata.tools.cli import output
    from strata.tools.cli.running import run
    from strata.tools.cli.target import load_identity, relay_url

    which = None if kind is None else cast("ModeratedKind", _kind(kind, ""))
    signer, url = load_identity(expanded(identity)), relay_url(relay, yes=yes)

    async def work() -> int:
        async with Moderator(url, signer, timeout=timeout) as moderator:
            entries: AsyncIterator[dict[str, object]]
            if action == "sessions":
                entries = moderator.sessions(cast("Literal['author', 'network'] | None", kind), subject)
            else:
                entries = moderator.bans(which) if action == "list" else moderator.log(subject)
            async for entry in entries:
                if as_json:
                    output.write_record(entry)
                else:
                    shown = [entry.get(name) for name in _COLUMNS[action == "sessions"]]
                    line = "  ".join(str(value) for value in shown if value is not None)
                    output.write_line(output.harmless(line))
        return 0

    run(work())


def _kind(kind: str | None, subject: str) -> str:
    if kind is None:
        if subject.startswith("did:"):
            return "author"
        if re.fullmatch(r"[0-9A-Fa-f.:]+(/\d+)?", subject):
            return "network"
        raise typer.BadParameter("say with --kind what the subject is")
    if kind not in _KINDS:
        raise typer.BadParameter(f"--kind is one of {', '.join(_KINDS)}")
    return kind


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise typer.BadParameter("--for takes a number and s, m, h, d or w, such as 12h")
    return int(found[1]) * _UNITS[found[2]]
