"""`strata moderate`: moderate what a relay serves, over the wire, as one of its operators."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from strata.protocol.times import duration
from strata.tools.cli.options import (
    CONTEXT_SETTINGS,
    DEFAULT_IDENTITY,
    DEFAULT_RELAY,
    ContextOption,
    IdentityOption,
    JsonOption,
    PinsOption,
    RelayOption,
    TimeoutOption,
    YesOption,
    expanded,
)

if TYPE_CHECKING:
    from strata.relays.moderating import Moderator

__all__ = ["app"]

app = typer.Typer(
    name="moderate",
    help="Moderate a relay as its operator.\n\nBan authors, packets, media, types and networks.",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)

_OF_RULINGS: Final = ("act", "kind", "subject", "actor", "reason")
_OF_SESSIONS: Final = ("id", "opened_at", "address", "identity", "subscriptions", "publishes", "events")
"""The members of an entry that are printed without `--json`."""
_DONE: Final = {"ban": "banned", "unban": "unbanned", "close": "closed"}

_SubjectKind = Literal["author", "packet", "media", "type", "network"]
_Kind = Annotated[
    _SubjectKind | None,
    typer.Option("--kind", help="What the subject is; needed for packets, media hashes and types."),
]
_Subject = Annotated[
    str,
    typer.Argument(metavar="SUBJECT", help="A DID or network; with --kind a packet id, media hash or type."),
]


@app.command()
def ban(
    subject: _Subject,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log of rulings.")
    ],
    kind: _Kind = None,
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long: 90s, 30m, 12h, 7d, 2w.")
    ] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Ban a subject; of a packet, remove it."""
    expires_at = None if lasting is None else int(time.time()) + _seconds(lasting)
    which = kind or _kind_of(subject)
    session = _session(relay, identity, timeout, pins, yes)
    _rule(
        session,
        lambda: session.ban(which, subject, reason=reason, expires_at=expires_at),
        "ban",
        which,
        subject,
        as_json=json,
    )


@app.command()
def unban(
    subject: _Subject,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log of rulings.")
    ] = "lifted",
    kind: _Kind = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Lift a ban; restore a packet.

    Exit code 1 if there was none.
    """
    which = kind or _kind_of(subject)
    session = _session(relay, identity, timeout, pins, yes)
    _rule(
        session, lambda: session.unban(which, subject, reason=reason), "unban", which, subject, as_json=json
    )


@app.command("list")
def list_(
    kind: Annotated[_SubjectKind | None, typer.Option("--kind", help="Only these.")] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print the bans in force."""
    session = _session(relay, identity, timeout, pins, yes)
    _print(session, session.bans(kind), _OF_RULINGS, as_json=json)


@app.command()
def log(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Only rulings about this subject.")
    ] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print who ruled what and why, the newest first."""
    session = _session(relay, identity, timeout, pins, yes)
    _print(session, session.log(subject), _OF_RULINGS, as_json=json)


@app.command()
def sessions(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="Only of this DID or network.")
    ] = None,
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print the open sessions of all processes."""
    which = None if subject is None else _kind_of(subject)
    session = _session(relay, identity, timeout, pins, yes)
    _print(session, session.sessions(which, subject), _OF_SESSIONS, as_json=json)


@app.command()
def close(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="As `sessions` prints it.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept in the log of rulings.")
    ],
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Close a session; its client may come back.

    Exit code 1 if there was none.
    """
    session = _session(relay, identity, timeout, pins, yes)
    _rule(
        session,
        lambda: session.close_session(session_id, reason=reason),
        "close",
        "session",
        session_id,
        as_json=json,
    )


def _session(relay: str, identity: Path, timeout: float, pins: Path | None, yes: bool) -> Moderator:
    """A session, not yet opened. Ends the command if the key file or the relay's URL is unusable."""
    from strata.relays.moderating import Moderator
    from strata.tools.cli.target import load_identity, relay_url

    signer, url = load_identity(expanded(identity)), relay_url(relay, yes=yes)
    return Moderator(url, signer, timeout=timeout, pins=pins)


def _rule(
    session: Moderator,
    ruling: Callable[[], Awaitable[bool]],
    action: Literal["ban", "unban", "close"],
    kind: str,
    subject: str,
    *,
    as_json: bool,
) -> None:
    """Make a ruling, which returns whether it has changed anything, and print the outcome."""
    from strata.tools.cli import output
    from strata.tools.cli.running import run

    async def work() -> int:
        async with session:
            changed = await ruling()
        if as_json:
            output.write_record({"action": action, "kind": kind, "subject": subject, "changed": changed})
        else:
            word = _DONE[action] if changed else "nothing to change:"
            output.write_line(f"{word} {kind} {output.harmless(subject)}")
        return 0 if changed or action == "ban" else 1

    run(work())


def _print(
    session: Moderator,
    entries: AsyncIterator[dict[str, object]],
    columns: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from strata.tools.cli import output
    from strata.tools.cli.running import run

    async def work() -> int:
        async with session:
            async for entry in entries:
                if as_json:
                    output.write_record(entry)
                else:
                    shown = [entry.get(name) for name in columns]
                    line = "  ".join(str(value) for value in shown if value is not None)
                    output.write_line(output.harmless(line))
        return 0

    run(work())


def _kind_of(subject: str) -> Literal["author", "network"]:
    """The kind of a subject, if its form shows it. Raises `typer.BadParameter` if not."""
    if subject.startswith("did:"):
        return "author"
    if re.fullmatch(r"[0-9A-Fa-f.:]+(/\d+)?", subject):
        return "network"
    raise typer.BadParameter("say with --kind what the subject is")


def _seconds(text: str) -> int:
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"--for: {error}") from None
