"""The relays a client has met before, in one small file: address and DID, nothing secret (R-298).

Trust on first use: the DID that a relay shows at the first authentication is written down. From then on the
client signs neither a challenge of another relay at that address, nor a challenge of that relay at another
address, which another relay might be forwarding. A pin is never replaced here. If a relay has a good reason
for a new identity, the user removes its line; if it has a second address, the user adds a line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from strata.protocol import ids
from strata.protocol.errors import IdentityError
from strata.protocol.files import replace_file

__all__ = ["PinFile", "address_of"]

_MAX_BYTES = 1_048_576


class PinFile:
    """A file with a JSON object from relay address to relay DID. Calls use the disk: make them on a thread.

    Two programs may share the file: it is replaced as a whole, never half-written. If both add a relay at the
    same moment, one line may be lost, and is added again at the next use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def get(self, url: str) -> str | None:
        """The DID pinned for the relay at `url`, or None.

        Raises `IdentityError` if the file is not a pin file (guessing would defeat its purpose), and
        `OSError` if it cannot be read.
        """
        return self._load().get(address_of(url))

    def met(self) -> dict[str, str]:
        """The DIDs of all pinned relays, each with one of its addresses.

        Raises `IdentityError` and `OSError` as `get` does.
        """
        return {did: address for address, did in self._load().items()}

    def add(self, url: str, relay_id: str) -> str:
        """Pin a relay unless its address is pinned already; returns the DID that is now pinned.

        Raises `IdentityError` and `OSError` as `get` does.
        """
        pins = self._load()
        pinned = pins.setdefault(address_of(url), relay_id)
        if pinned == relay_id:
            self._save(pins)
        return pinned

    def _load(self) -> dict[str, str]:
        try:
            with self._path.open("rb") as file:
                body = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        try:
            pins = json.loads(body)
        except (ValueError, RecursionError):
            pins = None
        if not isinstance(pins, dict) or not all(
            isinstance(did, str) and ids.is_did(did) for did in pins.values()
        ):
            raise IdentityError(f"{self._path} is not a file of pinned relays")
        return pins

    def _save(self, pins: dict[str, str]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = json.dumps(pins, indent=2, sort_keys=True) + "\n"
        replace_file(self._path, body.encode(), mode=None if self._path.exists() else 0o600)


def address_of(url: str) -> str:
    """What identifies a relay's address: scheme, host, port and path. Text that is not a URL is returned
    unchanged; nothing can connect to it."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
    except ValueError:
        return url
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path or '/'}"
