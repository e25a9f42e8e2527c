"""`strata`: keys, publishing and reading from a shell.

Results go to stdout (with `--json`, one JSON object a line), everything else to stderr. Exit codes: 0 done,
1 refused, unreachable or not found, 2 usage, 130 interrupted, 141 the reader of stdout went away. Whatever
a command needs is imported when it runs, so that `--help` and completion answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    str, typer.Option("--relay", envvar="STRATA_RELAY", metavar="URL", help="The relay's ws or wss URL.")
]
IdentityOption = Annotated[
    Path,
    typer.Option("--identity", envvar="STRATA_IDENTITY", metavar="FILE", help="The key file to sign with."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up after this long.")
]


@app.command()
def keygen(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the key file.")
    ] = DEFAULT_IDENTITY,
    json: JsonOption = False,
) -> None:
    """Make an identity and write its key file; never replaces one, never prints the key."""
    from strata.cli import commands

    commands.keygen(output.expanduser(), as_json=json)


@app.command()
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
    json: JsonOption = False,
) -> None:
    """Sign and publish; a packet's line is printed once the relay has stored it durably."""
    from strata.cli import commands

    if (text is not None) + (content is not None) + stdin != 1:
        raise typer.BadParameter("give one of --text, --content and --stdin")
    commands.publish(
        relay,
        identity.expanduser(),
        type=type,
        text=text,
        content=content,
        timeout=timeout,
        as_json=json,
    )


@app.command()
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
    json: JsonOption = False,
) -> None:
    """Print stored packets, then new ones as they come, each once and in the relay's order."""
    from strata.cli import commands

    commands.subscribe(
        relay,
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
    json: JsonOption = False,
) -> None:
    """Print one packet, verified. Exit code 1 if the relay does not have it."""
    from strata.cli import commands

    commands.get(relay, packet_id, timeout=timeout, as_json=json)


def main() -> None:
    """The entry point of the `strata` command."""
    app()
