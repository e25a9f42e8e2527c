"""`strata`: keys, publishing, reading and channels from a shell.

Results go to stdout (with `--json`, one JSON object a line), everything else to stderr. Exit codes: 0 done,
1 refused, unreachable or not found, 2 usage, 3 no relay to judge (`conformance`), 130 interrupted, 141 the
reader of stdout went away. Whatever a command needs is imported when it runs, so that `--help` and completion
answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from strata.tools.cli import identity as identities
from strata.tools.cli import relays

__all__ = ["app", "main"]

DEFAULT_RELAY = "ws://127.0.0.1:7447/strata"
DEFAULT_IDENTITY = Path("~/.config/strata/identity.json")

app = typer.Typer(
    name="strata",
    help="Publish signed packets to a Strata relay and read them back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RelayOption = Annotated[
    str,
    typer.Option(
        "--relay", envvar="STRATA_RELAY", metavar="URL", help="The relay's ws or wss URL, or a strata:// URI."
    ),
]
IdentityOption = Annotated[
    Path,
    typer.Option("--identity", envvar="STRATA_IDENTITY", metavar="FILE", help="The key file to sign with."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up after this long.")
]
AuthenticateOption = Annotated[
    Literal["never", "when_needed", "always"],
    typer.Option("--authenticate", help="When to prove the identity to the relay."),
]
ReaderOption = Annotated[
    Path | None,
    typer.Option("--identity", metavar="FILE", help="The key file to authenticate with, if need be."),
]
PinsOption = Annotated[
    Path | None,
    typer.Option(
        "--pins",
        envvar="STRATA_PINS",
        metavar="FILE",
        help="Remember here which relay was met where, and authenticate to no other one there.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Use the relay of a strata:// URI unasked.")]

_EPILOG = "What a relay learns about you by this: strata notice"


@app.command()
def keygen(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the key file.")
    ] = DEFAULT_IDENTITY,
    json: JsonOption = False,
) -> None:
    """Make an identity and write its key file; never replaces one, never prints the key."""
    from strata.tools.cli import commands

    commands.keygen(output.expanduser(), as_json=json)


@app.command(epilog=_EPILOG)
def publish(
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    type: Annotated[str, typer.Option("--type", help="The packet's content.type.")] = "POST",
    text: Annotated[str | None, typer.Option("--text", help="Publish one packet with this text.")] = None,
    content: Annotated[
        str | None, typer.Option("--content", metavar="JSON", help="Publish one packet with this content.")
    ] = None,
    stdin: Annotated[
        bool,
        typer.Option("--stdin", help="Publish a packet for each line: JSON as its content, else text."),
    ] = False,
    timeout: TimeoutOption = 30.0,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Sign and publish; a packet's line is printed once the relay has stored it durably."""
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    if (text is not None) + (content is not None) + stdin != 1:
        raise typer.BadParameter("give one of --text, --content and --stdin")
    signer = load_identity(identity.expanduser())
    commands.publish(
        Target.choose(relay, authenticate=authenticate, identity=signer, pins=pins, yes=yes),
        type=type,
        text=text,
        content=content,
        timeout=timeout,
        as_json=json,
    )


@app.command(epilog=_EPILOG)
def subscribe(
    relay: RelayOption = DEFAULT_RELAY,
    author: Annotated[
        list[str] | None, typer.Option("--author", metavar="DID", help="Only this author; may repeat.")
    ] = None,
    type: Annotated[
        list[str] | None, typer.Option("--type", help="Only this content.type; may repeat.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Unix seconds, ISO 8601, now, or an age: 90s 10m 2h 3d."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Likewise; needs --no-live.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after this many.")] = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Go on with new packets.")] = True,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Keep the position here: a rerun goes on from it."),
    ] = None,
    identity: ReaderOption = None,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Print stored packets, then new ones as they come, each once and in the relay's order."""
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    reader = None if identity is None else load_identity(identity.expanduser())
    commands.subscribe(
        Target.choose(relay, authenticate=authenticate, identity=reader, pins=pins, yes=yes),
        authors=tuple(author or ()),
        types=tuple(type or ()),
        since=since,
        until=until,
        count=count,
        live=live,
        state=state,
        as_json=json,
    )


@app.command()
def get(
    packet_id: Annotated[str, typer.Argument(metavar="PACKET_ID", help="0x and 64 hex digits.")],
    relay: RelayOption = DEFAULT_RELAY,
    timeout: TimeoutOption = 30.0,
    identity: ReaderOption = None,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Print one packet, verified. Exit code 1 if the relay does not have it."""
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    reader = None if identity is None else load_identity(identity.expanduser())
    target = Target.choose(relay, authenticate=authenticate, identity=reader, pins=pins, yes=yes)
    commands.get(target, packet_id, timeout=timeout, as_json=json)


@app.command()
def notice() -> None:
    """Say what a relay sees of whoever uses it."""
    from strata.relays.connection import WHAT_RELAYS_SEE
    from strata.tools.cli import output

    output.write_line(WHAT_RELAYS_SEE.rstrip())


@app.command("conformance")
def judge_relay(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The relay's ws or wss URL.")] = DEFAULT_RELAY,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROWS", help="Rows or checks, such as R-152,R-1*; may repeat."),
    ] = None,
    level: Annotated[
        Literal["MUST", "SHOULD", "MAY"], typer.Option("--level", help="The least binding rows to judge.")
    ] = "MAY",
    limits: Annotated[bool, typer.Option("--limits", help="Also the checks that flood the relay.")] = False,
    identity: Annotated[
        Path | None,
        typer.Option("--identity", metavar="FILE", help="Authenticate with this key, where that is needed."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=64, help="Checks at a time.")] = 8,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="End the run after this long.")
    ] = 300.0,
    list_only: Annotated[bool, typer.Option("--list", help="Show the checks and end.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Publish to a relay elsewhere unasked.")] = False,
    json: JsonOption = False,
) -> None:
    """Judge a relay from outside, row by row of RFC-0004; exit code 1 if a MUST does not hold."""
    from strata.tools.cli.conformance import Request, conformance, list_checks
    from strata.tools.conformance.model import Level

    request = Request(
        url,
        only=tuple(only or ()),
        level=Level(level),
        limits=limits,
        identity=identity,
        concurrency=concurrency,
        timeout=timeout,
        yes=yes,
        as_json=json,
    )
    list_checks(request) if list_only else conformance(request)


@app.command("channel", epilog=_EPILOG)
def join_channel(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What all participants call the channel.")],
    topic: Annotated[
        str, typer.Option("--topic", metavar="TOPIC", help="Where it travels, such as /chat/1/room/proto.")
    ],
    relay: Annotated[
        list[str] | None,
        typer.Option(
            "--relay",
            envvar="STRATA_RELAY",
            metavar="URL",
            help="A relay's ws or wss URL, or a strata:// URI; may repeat: several are used as one.  "
            f"[default: {DEFAULT_RELAY}]",
        ),
    ] = None,
    identity: IdentityOption = DEFAULT_IDENTITY,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="FILE", help="Keep the channel's state here: a later run goes on from it."
        ),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option("--sender", metavar="ID", help="Your name, unlike all others'; else one is made."),
    ] = None,
    key: Annotated[
        list[Path] | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Encrypt with this group key; may repeat: the first encrypts, all decrypt.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.001,
            metavar="SECONDS",
            help="Wait this long for delivery after the input ends.",
        ),
    ] = 60.0,
    listen: Annotated[bool, typer.Option("--listen", help="Read no input; print until Ctrl-C.")] = False,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Chat in a reliable channel: each line typed is sent, and its state shown until it is delivered.

    With --json, lines are text, {"text": "…"} or {"base64": "…"}, and each event of the channel is an object.
    After the end of input (Ctrl-D) it waits until everything is delivered; exit code 1 if something is not.
    """
    from strata.tools.cli import channel

    channel.channel(
        channel.Request(
            name=name,
            topic=topic,
            relays=tuple(relay or (DEFAULT_RELAY,)),
            identity=identity.expanduser(),
            store=None if store is None else store.expanduser(),
            sender=sender,
            keys=tuple(path.expanduser() for path in key or ()),
            timeout=timeout,
            listen=listen,
            authenticate=authenticate,
            pins=pins,
            yes=yes,
            as_json=json,
        )
    )


@app.command("channel-key")
def make_channel_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the key file.")],
    json: JsonOption = False,
) -> None:
    """Make a group key that encrypts a channel; never replaces one, never prints the key."""
    from strata.tools.cli import channel

    channel.channel_key(file.expanduser(), as_json=json)


app.add_typer(identities.app)
app.add_typer(relays.app)


def main() -> None:
    """The entry point of the `strata` command."""
    app()
