"""The guard: a file outside the database that says how far the log was acknowledged.

It is written now and then, so it lags; but the log must reach at least that far, and if it does not, an older
copy of the database has been restored. Each host has its own guard; one that is missing or unreadable says
nothing. Cursors need no guard: their terms are enough (`relayd.lineage`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from strata.protocol.files import replace_file

from relayd.lineage import Claim

__all__ = ["Guard"]

_MAX_BYTES = 65_536


class _Content(msgspec.Struct):
    log: str
    claim: Claim


class Guard:
    """The file at `path`. `log_key` is a secret of the log: a guard of another log does not count."""

    def __init__(self, path: Path, log_key: bytes) -> None:
        self._path = path
        self._log = hashlib.blake2s(b"guard", key=log_key, digest_size=8).hexdigest()
        self._written: Claim | None = None

    def read(self) -> Claim | None:
        """The file's claim about this log; None if it has none."""
        try:
            with self._path.open("rb") as file:
                content = msgspec.json.decode(file.read(_MAX_BYTES), type=_Content)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if content.log != self._log:
            return None
        # Written some time before the end: later places were acknowledged too.
        return msgspec.structs.replace(content.claim, is_exact=False)

    def write(self, claim: Claim) -> None:
        """Replace the file, durably, unless it says the same already. Raises `OSError`."""
        if claim == self._written:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._path, msgspec.json.encode(_Content(self._log, claim)), mode=0o600)
        self._written = claim
