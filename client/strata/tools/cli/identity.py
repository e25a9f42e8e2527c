"""`strata identity`: the keys of a DID, from the first to the last.

This module defines only the command lines, so that `--help` loads nothing else; `custody` does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.tools.cli.options import (
    CONTEXT_SETTINGS,
    DEFAULT_IDENTITY,
    DEFAULT_RELAY,
    ContextOption,
    IdentityOption,
    JsonOption,
    PinsOption,
    PlainRelayOption,
    TimeoutOption,
    expanded,
    relay_url_given,
)

__all__ = ["app"]

_DEFAULT_DELAY = 86_400

app = typer.Typer(
    name="identity",
    help="Make, rotate, revoke and recover the keys of a DID.\n\nNo command prints a key.",
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)

ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="The reason; anyone can read it.")
]
DelayOption = Annotated[
    int,
    typer.Option(
        "--recovery-delay",
        min=0,
        metavar="SECONDS",
        help="How long a recovery waits at the relay before it takes effect.",
    ),
]
ThresholdOption = Annotated[
    int | None,
    typer.Option(
        "--threshold",
        min=1,
        metavar="K",
        help="How many recovery keys must agree; by default more than half.",
    ),
]


@app.command()
def create(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the key file.")
    ] = DEFAULT_IDENTITY,
    recovery: Annotated[
        int, typer.Option("--recovery", min=0, max=16, metavar="N", help="Make this many recovery keys too.")
    ] = 0,
    threshold: ThresholdOption = None,
    relay: Annotated[
        str | None,
        typer.Option(
            "--relay",
            metavar="URL",
            callback=relay_url_given,
            help="Publish the document that names the recovery keys at this relay.",
        ),
    ] = None,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    json: JsonOption = False,
) -> None:
    """Make an identity, with recovery keys if wanted.

    Each recovery key gets its own file, and the document that names them is published.
    """
    from strata.tools.cli import custody

    if recovery and relay is None:
        raise typer.BadParameter("recovery keys count once a relay has the document naming them: add --relay")
    if threshold is not None and threshold > recovery:
        raise typer.BadParameter("--threshold exceeds the number of recovery keys")
    custody.create(
        expanded(output), recovery, threshold, relay=relay or "", pins=pins, timeout=timeout, as_json=json
    )


@app.command()
def document(
    recovery_key: Annotated[
        list[Path], typer.Option("--recovery-key", metavar="FILE", help="A recovery key to name; may repeat.")
    ],
    threshold: ThresholdOption = None,
    relay: PlainRelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Publish the first document of a DID.

    It names recovery keys that were made before.
    """
    from strata.tools.cli import custody

    if threshold is not None and threshold > len(recovery_key):
        raise typer.BadParameter("--threshold exceeds the number of recovery keys")
    custody.document(
        expanded(identity),
        [expanded(path) for path in recovery_key],
        threshold,
        relay=relay,
        pins=pins,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def rotate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the new key file.")
    ],
    replaces: Annotated[
        str | None,
        typer.Option(
            "--replaces", metavar="KEY_ID", help="The key to replace; by default the key that signs."
        ),
    ] = None,
    reason: ReasonOption = None,
    relay: PlainRelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Replace a key by a new one; the DID stays the same.

    Signed with a recovery key, this asks for a recovery.
    """
    from strata.tools.cli import custody

    custody.rotate(
        expanded(identity),
        expanded(output),
        replaces,
        reason=reason,
        relay=relay,
        pins=pins,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key, as `show` names it.")],
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="TIME",
            help="The time from which the key is revoked: Unix seconds, ISO 8601, now, 2h.",
        ),
    ] = "now",
    reason: ReasonOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Revoke the key even if no key is left to sign with.")
    ] = False,
    relay: PlainRelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Revoke a key permanently.

    Nothing that the key signs afterwards counts.
    """
    from strata.tools.cli import custody

    custody.revoke(
        expanded(identity),
        key_id,
        at,
        reason=reason,
        yes=yes,
        relay=relay,
        pins=pins,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def approve(
    event: Annotated[str, typer.Argument(metavar="PACKET_ID", help="The event, as `show` names it.")],
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="A note; anyone can read it.")
    ] = None,
    recovery_delay: DelayOption = _DEFAULT_DELAY,
    relay: PlainRelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Agree to a recovery with a recovery key."""
    from strata.tools.cli import custody

    custody.approve(
        expanded(identity),
        event,
        note=note,
        recovery_delay=recovery_delay,
        relay=relay,
        pins=pins,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def show(
    command: typer.Context,
    did: Annotated[
        str | None, typer.Argument(metavar="DID", help="The DID; by default that of the key file.")
    ] = None,
    recovery_delay: DelayOption = _DEFAULT_DELAY,
    relay: PlainRelayOption = DEFAULT_RELAY,
    identity: IdentityOption = DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Print the keys of a DID.

    They come from packets of the relay, and every packet is verified here. Where reading requires
    authentication, the key file authenticates; give --identity if you ask for another DID.
    """
    from strata.tools.cli import custody

    source = command.get_parameter_source("identity")
    is_named = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    custody.show(
        did,
        expanded(identity) if did is None or is_named else None,
        recovery_delay=recovery_delay,
        relay=relay,
        pins=pins,
        timeout=timeout,
        as_json=json,
    )
