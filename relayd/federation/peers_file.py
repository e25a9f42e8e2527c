"""The file that names the relays this one reads from: a URL and a DID for each; nothing is guessed.

    [[peer]]
    url = "wss://relay.example.net/strata"
    relay_id = "did:strata:z6Mk…"
    group = "mesh"

The other relay names this relay's DID in its `replication_peers`. No manifest, packet or peer adds an entry.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from strata.protocol.ids import is_did
from strata.protocol.text_files import utf8_of

from relayd.config import ConfigurationError

__all__ = ["MAX_PEERS", "Upstream", "read_peers"]

MAX_PEERS = 64
_MAX_BYTES = 1_048_576
_Names = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=500)]


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A relay that this one reads from."""

    url: Annotated[str, Meta(max_length=2048)]
    """Its WebSocket endpoint, `ws://` or `wss://`."""
    relay_id: str
    """Its DID: a relay with another DID is not read from."""
    types: _Names = ()
    """The content types to read; empty for all. Packets that carry keys are always read."""
    authors: _Names = ()
    """The authors to read; empty for all."""
    group: Annotated[str, Meta(max_length=64)] = ""
    """Peers of one group all read from each other: each is asked for its log without what the others have."""
    trust_received_at: bool = True
    """Whether its word counts about when a packet was first received; otherwise the local time counts."""

    @property
    def is_whole(self) -> bool:
        """Whether everything is read from it."""
        return not self.types and not self.authors


class _File(msgspec.Struct, forbid_unknown_fields=True):
    peer: tuple[Upstream, ...] = ()


def read_peers(path: Path | None, *, own_id: str | None = None) -> tuple[Upstream, ...]:
    """The upstreams that a file names; none without a file. Raises `ConfigurationError` with all faults."""
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise ConfigurationError([f"{path}: more than {_MAX_BYTES} bytes"])
        peers = msgspec.convert(tomllib.loads(utf8_of(body).decode()), _File).peer
    except OSError as error:
        raise ConfigurationError([f"{path}: {error.strerror}"]) from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigurationError([f"{path}: {error}"]) from None
    problems = _problems(path, peers, own_id)
    if problems:
        raise ConfigurationError(problems)
    return peers


def _problems(path: Path, peers: tuple[Upstream, ...], own_id: str | None) -> list[str]:
    problems = []
    if len(peers) > MAX_PEERS:
        problems.append(f"{path}: more than {MAX_PEERS} peers")
    seen: set[str] = set()
    for peer in peers:
        if not is_did(peer.relay_id):
            problems.append(f"{path}: {peer.relay_id} is not a DID")
        if peer.relay_id in seen:
            problems.append(f"{path}: {peer.relay_id} is named twice")
        if peer.relay_id == own_id:
            problems.append(f"{path}: {peer.relay_id} is this relay itself")
        if peer.group and not peer.is_whole:
            problems.append(f"{path}: {peer.relay_id} is in a group, and only a part of it is read")
        if not _is_websocket(peer.url):
            problems.append(f"{path}: {peer.url} is not a ws:// or wss:// URL")
        seen.add(peer.relay_id)
    return problems


def _is_websocket(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
