"""`strata identity`: the keys behind a DID, from the first to the last.

Only the command lines are here, so that `--help` loads nothing else; the work is in `custody`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

_DEFAULT_RELAY = "ws://127.0.0.1:7447/strata"
_DEFAULT_IDENTITY = Path("~/.config/strata/identity.json")
_DEFAULT_DELAY = 86_400

app = typer.Typer(
    name="identity",
    help="Make, rotate, revoke and recover the keys behind a DID. No command prints a key.",
    no_args_is_help=True,
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
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why, for everybody to read.")
]
DelayOption = Annotated[
    int,
    typer.Option("--recovery-delay", min=0, metavar="SECONDS", help="How long the relay lets recovery wait."),
]
ThresholdOption = Annotated[
    int | None,
    typer.Option("--threshold", min=1, metavar="K", help="Recovery keys that must agree; default: most."),
]


@app.command()
def create(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the key file.")
    ] = _DEFAULT_IDENTITY,
    recovery: Annotated[
        int, typer.Option("--recovery", min=0, max=16, metavar="N", help="Make this many recovery keys too.")
    ] = 0,
    threshold: ThresholdOption = None,
    relay: Annotated[
        str | None,
        typer.Option("--relay", metavar="URL", help="Publish the document that names the recovery keys."),
    ] = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Make an identity; with recovery keys, each in a file of its own, publish the document naming them."""
    from strata.tools.cli import custody

    if recovery and relay is None:
        raise typer.BadParameter("recovery keys count once a relay has the document naming them: add --relay")
    if threshold is not None and threshold > recovery:
        raise typer.BadParameter("--threshold exceeds the number of recovery keys")
    custody.create(output.expanduser(), recovery, threshold, relay=relay or "", timeout=timeout, as_json=json)


@app.command()
def document(
    recovery_key: Annotated[
        list[Path], typer.Option("--recovery-key", metavar="FILE", help="A recovery key to name; may repeat.")
    ],
    threshold: ThresholdOption = None,
    relay: RelayOption = _DEFAULT_RELAY,
    identity: IdentityOption = _DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Publish the first document of a DID, with recovery keys made before."""
    from strata.tools.cli import custody

    if threshold is not None and threshold > len(recovery_key):
        raise typer.BadParameter("--threshold exceeds the number of recovery keys")
    custody.document(
        identity.expanduser(),
        [path.expanduser() for path in recovery_key],
        threshold,
        relay=relay,
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
        typer.Option("--replaces", metavar="KEY_ID", help="The key to replace; default: the one signing."),
    ] = None,
    reason: ReasonOption = None,
    relay: RelayOption = _DEFAULT_RELAY,
    identity: IdentityOption = _DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Put a new key in the place of an old one; the DID stays. With a recovery key this asks for recovery."""
    from strata.tools.cli import custody

    custody.rotate(
        identity.expanduser(),
        output.expanduser(),
        replaces,
        reason=reason,
        relay=relay,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key, as `show` names it.")],
    at: Annotated[
        str, typer.Option("--at", metavar="TIME", help="From when on: Unix seconds, ISO 8601, now, 2h.")
    ] = "now",
    reason: ReasonOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Even if no key is left that could sign.")] = False,
    relay: RelayOption = _DEFAULT_RELAY,
    identity: IdentityOption = _DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """End a key for good: nothing new counts that it signs."""
    from strata.tools.cli import custody

    custody.revoke(
        identity.expanduser(), key_id, at, reason=reason, yes=yes, relay=relay, timeout=timeout, as_json=json
    )


@app.command()
def approve(
    event: Annotated[str, typer.Argument(metavar="PACKET_ID", help="The event, as `show` names it.")],
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="A note for everybody to read.")
    ] = None,
    recovery_delay: DelayOption = _DEFAULT_DELAY,
    relay: RelayOption = _DEFAULT_RELAY,
    identity: IdentityOption = _DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Agree, with a recovery key, to a recovery that is under way."""
    from strata.tools.cli import custody

    custody.approve(
        identity.expanduser(),
        event,
        note=note,
        recovery_delay=recovery_delay,
        relay=relay,
        timeout=timeout,
        as_json=json,
    )


@app.command()
def show(
    did: Annotated[
        str | None, typer.Argument(metavar="[DID]", help="Whose keys; default: the key file's DID.")
    ] = None,
    recovery_delay: DelayOption = _DEFAULT_DELAY,
    relay: RelayOption = _DEFAULT_RELAY,
    identity: IdentityOption = _DEFAULT_IDENTITY,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Print the keys of a DID as a relay's packets tell them, verified here."""
    from strata.tools.cli import custody

    custody.show(
        did,
        identity.expanduser(),
        recovery_delay=recovery_delay,
        relay=relay,
        timeout=timeout,
        as_json=json,
    )
