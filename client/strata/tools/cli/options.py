"""Options that several commands share, and where their values come from.

A value comes from the first of these that provides it: the option, the context named by `--context`, the
environment variable of the option, the context named by STRATA_CONTEXT, the context in use (`strata context
use`), the default.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "CONTEXT_SETTINGS",
    "DEFAULT_IDENTITY",
    "DEFAULT_RELAY",
    "AuthenticateOption",
    "ContextOption",
    "IdentityOption",
    "JsonOption",
    "PinsOption",
    "PlainRelayOption",
    "ReaderOption",
    "RelayOption",
    "TimeoutOption",
    "UrlArgument",
    "YesOption",
    "expanded",
    "relay_url_given",
]

DEFAULT_RELAY = "ws://127.0.0.1:7447/strata"
DEFAULT_IDENTITY = Path("~/.config/strata/identity.json")
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


def expanded(path: Path) -> Path:
    """A path with the user's home folder for ~. Ends the command with exit code 2 if there is none."""
    with contextlib.suppress(
        RuntimeError
    ):  # no HOME, and no passwd entry for the user, as in some containers
        if path.parts[:1] != ("~",) or os.environ.get("HOME") != "":
            return path.expanduser()
    from strata.tools.cli import output

    output.misuse(f"{path}: this user has no home folder; set HOME, or name another file")


def _take_defaults_from_context(command: typer.Context, name: str | None) -> str | None:
    """Use a saved context for what no option provides; it precedes variables only if it was typed."""
    if command.resilient_parsing:  # the shell is completing a word
        return name
    from strata.tools.cli.context_file import ContextFile

    saved = ContextFile.read_or_exit().chosen(name)
    if saved is not None:
        values = {
            "relay": saved.relay,
            "url": saved.relay,
            "identity": saved.identity,
            "pins": saved.pins,
        }
        source = command.get_parameter_source("context")
        if source is not None and source.name == "COMMANDLINE":
            for option in command.command.params:
                if values.get(option.name or "") is not None and isinstance(option.envvar, str):
                    os.environ.pop(option.envvar, None)  # otherwise it would precede the default map
        command.default_map = {
            option.name: [value] if getattr(option, "multiple", False) else value
            for option in command.command.params
            if option.name is not None and (value := values.get(option.name)) is not None
        }
    return name


def relay_url_given(command: typer.Context, url: str | None) -> str | None:
    """The URL of a relay that an option gives; for use as a callback. Exit code 2 if it is none."""
    if url is not None and not command.resilient_parsing:  # the shell is not completing a word
        from strata.relays.uris import is_relay_uri
        from strata.tools.cli import output
        from strata.tools.cli.target import require_relay_url

        if is_relay_uri(url):
            output.misuse("--relay: give the ws or wss URL; strata context add saves that of a URI")
        require_relay_url(url, "--relay: ")
    return url


ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        envvar="STRATA_CONTEXT",
        metavar="NAME",
        is_eager=True,  # read before the options for which it sets defaults
        callback=_take_defaults_from_context,
        help="Take relay, identity and pins from this saved context, unless an option gives them.",
    ),
]
RelayOption = Annotated[
    str,
    typer.Option(
        "--relay",
        envvar="STRATA_RELAY",
        metavar="URL",
        help="The relay: a ws or wss URL, or a strata:// URI.",
    ),
]
PlainRelayOption = Annotated[
    str,
    typer.Option(
        "--relay",
        envvar="STRATA_RELAY",
        metavar="URL",
        callback=relay_url_given,
        help="The relay's ws or wss URL.",
    ),
]
UrlArgument = Annotated[
    str, typer.Argument(envvar="STRATA_RELAY", metavar="URL", help="The relay's ws or wss URL.")
]
IdentityOption = Annotated[
    Path,
    typer.Option("--identity", envvar="STRATA_IDENTITY", metavar="FILE", help="The key file to sign with."),
]
ReaderOption = Annotated[
    Path | None,
    typer.Option(
        "--identity", metavar="FILE", help="The key file to authenticate with, if the relay asks for it."
    ),
]
AuthenticateOption = Annotated[
    Literal["never", "when_needed", "always"],
    typer.Option("--authenticate", help="When to prove the identity to the relay."),
]
PinsOption = Annotated[
    Path | None,
    typer.Option(
        "--pins",
        envvar="STRATA_PINS",
        metavar="FILE",
        help="Remember in this file which relay answered at which address, and authenticate to no other "
        "relay there.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up after this long.")
]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Use the relay of a strata:// URI without asking.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for programs.")]
