"""The relay that a command talks to: its URL, the user's identity, and the consent to a proposed relay."""

from __future__ import annotations

import dataclasses
import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import typer

from strata.channels.connecting import Relay, connect
from strata.protocol.errors import ConnectionFailed, StrataError
from strata.protocol.ids import Identity
from strata.relays import uris
from strata.relays.connection import Options
from strata.relays.connection.dialing import check_url
from strata.tools.cli import output

__all__ = [
    "Authenticate",
    "Target",
    "is_on_this_machine",
    "load_identity",
    "relay_url",
    "require_relay_url",
    "save_identity",
]

Authenticate = Literal["never", "when_needed", "always"]


@dataclass(frozen=True, slots=True)
class Target:
    """One relay, and how to connect to it."""

    url: str
    """A ws or wss URL."""
    authenticate: Authenticate = "when_needed"
    identity: Identity | None = None
    pins: Path | None = None

    @classmethod
    def choose(
        cls,
        relay: str,
        *,
        authenticate: Authenticate,
        identity: Identity | None,
        pins: Path | None,
        yes: bool,
    ) -> Target:
        """The relay that a user names by URL or relay URI. A proposed relay is used once they agree (R-402).

        Ends the command with exit code 2 for an unusable URL or URI, for a relay not agreed to, and for
        `authenticate="always"` without an identity.
        """
        if authenticate == "always" and identity is None:
            output.misuse("--authenticate always needs --identity FILE")
        url = _agreed(relay, yes=yes) if uris.is_relay_uri(relay) else relay
        require_relay_url(url)
        return cls(url, authenticate, identity, pins)

    def connect(self, options: Options) -> Relay:
        """A connection to the relay, not yet opened."""
        options = dataclasses.replace(options, authenticate=self.authenticate)
        return connect(self.url, identity=self.identity, pins=self.pins, options=options)


def load_identity(path: Path, *, made_by: str = "strata keygen") -> Identity:
    """The identity in a key file. Ends the command with an error message if there is none."""
    try:
        return Identity.load(path)
    except FileNotFoundError:
        output.fail(f"there is no identity at {path}; make one with: {made_by} --output {path}")
    except (StrataError, OSError) as error:
        output.fail(error)


def save_identity(identity: Identity, path: Path) -> None:
    """Write a key file. Ends the command with an error message if it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity.save(path)
    except FileExistsError:
        output.fail(f"{path} exists already and is not replaced; choose another file with --output")
    except OSError as error:
        output.fail(f"cannot write {path}: {error.strerror}")


def is_on_this_machine(url: str) -> bool:
    """Whether a URL leads to a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def require_relay_url(url: str, option: str = "") -> None:
    """End the command with exit code 2 unless this is a ws or wss URL; `option` says where it was given."""
    try:
        check_url(url)
    except ConnectionFailed as error:
        output.misuse(f"{option}{error}")


def relay_url(text: str, *, yes: bool) -> str:
    """The ws or wss URL to save for a relay. Ends the command with exit code 2 for an unusable one."""
    url = _agreed(text, yes=yes) if uris.is_relay_uri(text) else text
    require_relay_url(url, "--relay: ")
    if urlsplit(url).password is not None:
        output.misuse("--relay: a password is not saved; leave it out of the URL")
    return url


def _agreed(text: str, *, yes: bool) -> str:
    """The URL that a relay URI proposes, once the user has seen it and agreed."""
    try:
        proposal = uris.parse(text)
    except ValueError as error:
        output.misuse(f"--relay: {error}")
    name = f" ({output.harmless(proposal.label)})" if proposal.label else ""
    output.note(f"proposed relay: {proposal.ws}{name}")
    for warning in proposal.warnings:
        output.note(f"warning: {warning}")
    if not yes:
        if not sys.stdin.isatty():
            output.misuse("a relay URI is used once you agree: add --yes")
        if not typer.confirm("Use it?", err=True):
            output.misuse("not used")
    return proposal.ws
