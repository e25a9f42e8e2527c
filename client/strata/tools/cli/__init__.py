"""`strata`: keys, publishing, reading and channels from a shell.

Results go to stdout (with `--json`, one JSON object per line), everything else to stderr. Exit codes: 0 done,
1 refused, unreachable or not found, 2 usage, 3 no relay to judge (`conformance`), 130 interrupted, 141 the
reader of stdout went away. Each command imports what it needs when it runs, so that `--help` and completion
answer at once.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal

import typer

from strata.protocol.programs import run_program
from strata.tools.cli import contexts, moderate, relays
from strata.tools.cli import identity as identities
from strata.tools.cli.options import (
    CONTEXT_SETTINGS,
    DEFAULT_IDENTITY,
    DEFAULT_RELAY,
    AuthenticateOption,
    ContextOption,
    IdentityOption,
    JsonOption,
    PinsOption,
    ReaderOption,
    RelayOption,
    TimeoutOption,
    UrlArgument,
    YesOption,
    expanded,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="strata",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EPILOG = "What a relay learns about you by this: strata notice"


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("strata-sdk"))
        except PackageNotFoundError:  # run from a source tree that was never installed
            typer.echo("0+unknown")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Publish signed packets to a Strata relay and read them back."""


@app.command()
def keygen(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the key file.")
    ] = DEFAULT_IDENTITY,
    json: JsonOption = False,
) -> None:
    """Make an identity and write its key file.

    An existing file is never replaced, and the key is never printed.
    """
    from strata.tools.cli import commands

    commands.keygen(expanded(output), as_json=json)


@app.command(epilog=_EPILOG)
def publish(
    relay: RelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    type: Annotated[str, typer.Option("--type", metavar="TYPE", help="The packet's content.type.")] = "POST",
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="Publish one packet with this text.")
    ] = None,
    content: Annotated[
        str | None, typer.Option("--content", metavar="JSON", help="Publish one packet with this content.")
    ] = None,
    stdin: Annotated[
        bool,
        typer.Option(
            "--stdin",
            help="Publish a packet for each line of stdin, a JSON object as its content, else text.",
        ),
    ] = False,
    timeout: TimeoutOption = 30.0,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Sign packets and publish them.

    The id of a packet is printed once the relay has stored it durably.
    """
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    if (text is not None) + (content is not None) + stdin != 1:
        raise typer.BadParameter("give one of --text, --content and --stdin")
    signer = load_identity(expanded(identity))
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
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only this content.type; may repeat.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Packets from this time on: Unix seconds, ISO 8601, now, or an age: 90s 10m 2h 3d 1w.",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="The same for the end; needs --no-live.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "--count", "-n", min=1, metavar="N", help="End after this many packets, stored or new."
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live/--no-live", help="Continue with new packets, or end after the stored ones."),
    ] = True,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="FILE", help="Keep the position in this file; the next run continues there."
        ),
    ] = None,
    identity: ReaderOption = None,
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print stored packets, then new ones as they come.

    Each packet is printed once, in the relay's order.
    """
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    reader = None if identity is None else load_identity(expanded(identity))
    commands.subscribe(
        Target.choose(relay, authenticate=authenticate, identity=reader, pins=pins, yes=yes),
        authors=tuple(author or ()),
        types=tuple(type or ()),
        since=since,
        until=until,
        limit=limit,
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
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print one packet, verified.

    Exit code 1 if the relay does not have it.
    """
    from strata.tools.cli import commands
    from strata.tools.cli.target import Target, load_identity

    reader = None if identity is None else load_identity(expanded(identity))
    target = Target.choose(relay, authenticate=authenticate, identity=reader, pins=pins, yes=yes)
    commands.get(target, packet_id, timeout=timeout, as_json=json)


@app.command("status", epilog=_EPILOG)
def look_at_relay(
    url: UrlArgument = DEFAULT_RELAY,
    identity: ReaderOption = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, max=100, metavar="N", help="Measure this many times.")
    ] = 5,
    timeout: TimeoutOption = 5.0,
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Show whether a relay can be reached, and what its limits are.

    The output has the relay's id, extensions and limits, its clock, and how long it takes to answer. With an
    identity, it also says what the relay lets that identity do. Exit code 1 if the relay cannot be reached or
    does not accept the identity.
    """
    from strata.tools.cli.status import status
    from strata.tools.cli.target import Target, load_identity

    reader = None if identity is None else load_identity(expanded(identity))
    target = Target.choose(url, authenticate="when_needed", identity=reader, pins=pins, yes=yes)
    status(target, samples=samples, timeout=timeout, as_json=json)


@app.command("bench", epilog=_EPILOG)
def measure_relay(
    url: UrlArgument = DEFAULT_RELAY,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=1_000_000, metavar="N", help="Packets in each part.")
    ] = 5000,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=0.1, max=3600, metavar="SECONDS", help="Publish this long in each part."
        ),
    ] = 5.0,
    connections: Annotated[
        int,
        typer.Option("--connections", "-c", min=1, max=1000, metavar="N", help="Connections that publish."),
    ] = 4,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", min=1, max=10_000, metavar="N", help="Unacknowledged packets on each connection."
        ),
    ] = 32,
    subscribers: Annotated[
        int,
        typer.Option(
            "--subscribers", "-s", min=0, max=10_000, metavar="N", help="Subscribers; 0 leaves fan-out out."
        ),
    ] = 10,
    size: Annotated[
        int, typer.Option("--size", min=0, max=100_000, metavar="BYTES", help="Bytes of text in each packet.")
    ] = 200,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write to a relay on another machine.")] = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a relay of your own: publishing and fan-out.

    This writes packets to the relay, under a throw-away identity and type; they expire after ten minutes.
    Each part ends when its packets or its seconds are used up. The packets are signed before the clock
    starts. Exit code 1 if a packet was refused or a delivery is missing.
    """
    from strata.tools.cli.bench import BenchRequest, bench

    request = BenchRequest(
        url=url,
        count=count,
        seconds=seconds,
        connections=connections,
        in_flight=in_flight,
        subscribers=subscribers,
        size=size,
        yes=yes,
        as_json=json,
    )
    bench(request)


@app.command()
def notice() -> None:
    """Explain what a relay learns about its users."""
    from strata.relays.connection import WHAT_RELAYS_SEE
    from strata.tools.cli import output

    output.write_line(WHAT_RELAYS_SEE.rstrip())


@app.command("channel", epilog=_EPILOG)
def join_channel(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name that all participants give the channel.")
    ],
    topic: Annotated[
        str,
        typer.Option(
            "--topic", metavar="TOPIC", help="The content topic it travels under, such as /chat/1/room/proto."
        ),
    ],
    relay: Annotated[
        list[str] | None,
        typer.Option(
            "--relay",
            envvar="STRATA_RELAY",
            metavar="URL",
            help="A relay: a ws or wss URL, or a strata:// URI; may repeat: several are used as one.  "
            f"[default: {DEFAULT_RELAY}]",
        ),
    ] = None,
    identity: IdentityOption = DEFAULT_IDENTITY,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="FILE",
            help="Keep the channel's state in this file: the next run continues from it.",
        ),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option(
            "--sender", metavar="ID", help="Your id, different from all others; by default one is made."
        ),
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
    listen: Annotated[bool, typer.Option("--listen", help="Read no input, and print until Ctrl-C.")] = False,
    join: Annotated[
        Literal["history", "now"],
        typer.Option("--join", help="Where to begin when you are new: with all that was said, or now."),
    ] = "history",
    authenticate: AuthenticateOption = "when_needed",
    pins: PinsOption = None,
    yes: YesOption = False,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Chat in a reliable channel.

    Each line typed is sent, and its state is shown until it is delivered. With --json, a line is text,
    {"text": "…"} or {"base64": "…"}, and each event of the channel is printed as an object. After the end of
    input (Ctrl-D) the command waits until everything is delivered; exit code 1 if something is not.
    """
    from strata.tools.cli import channel

    channel.channel(
        channel.ChatRequest(
            name=name,
            topic=topic,
            relays=tuple(relay or (DEFAULT_RELAY,)),
            identity=expanded(identity),
            store=None if store is None else expanded(store),
            sender=sender,
            keys=tuple(expanded(path) for path in key or ()),
            timeout=timeout,
            listen=listen,
            join=join,
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
    """Make a group key that encrypts a channel.

    An existing file is never replaced, and the key is never printed.
    """
    from strata.tools.cli import channel

    channel.channel_key(expanded(file), as_json=json)


app.add_typer(identities.app)
app.add_typer(relays.app)
app.add_typer(contexts.app)
app.add_typer(moderate.app)
for _entry in entry_points(group="strata.commands"):  # of other distributions, such as the test kit
    _entry.load()(app)


def main() -> None:
    """The entry point of the `strata` command."""
    run_program(app, "strata", says="error", install="pip install 'strata-sdk[cli,channels]'")
