"""The relays a client has met before, in one small file: address and DID, nothing secret (R-298).

Trust on first use: the DID a relay shows when it is first authenticated to is written down, and from then on
no challenge of another relay at that address is signed, and none of that relay at another address: whoever
passes a relay's challenge on is another relay. A pin is never replaced here: when a relay has a new identity
for a good reason, the user removes the line; when it has a second address, the user adds one.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from strata.protocol import ids
from strata.protocol.errors import IdentityError

__all__ = ["PinFile", "address_of"]

_MAX_BYTES = 1_048_576


class PinFile:
    """A JSON object from relay address to relay DID. Calls touch the disk: make them on a thread.

    Two programs may share the file: it is replaced as a whole, never half-written. Where both add a relay at
    the same moment one addition may be lost, and is made again at the next use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def get(self, url: str) -> str | None:
        """The DID pinned for the relay at `url`, or None.

        Raises `IdentityError` if the file is not a pin file: guessing would defeat its purpose. Raises
        `OSError` as the file system does.
        """
        return self._load().get(address_of(url))

    def met(self) -> dict[str, str]:
        """The DIDs of all relays pinned, each with an address.

        Raises `IdentityError` and `OSError` as `get` does.
        """
        return {did: address for address, did in self._load().items()}

    def add(self, url: str, relay_id: str) -> str:
        """Pin a relay unless it is pinned already; returns the DID that is now pinned.

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
        descriptor, temporary = tempfile.mkstemp(prefix=self._path.name, dir=self._path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(pins, file, indent=2, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            os.unlink(temporary)
            raise


def address_of(url: str) -> str:
    """What tells one relay's address from another's: scheme, host, port and path. Text that is no URL is its
    own address, to which nothing connects."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
    except ValueError:
        return url
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path or '/'}"
