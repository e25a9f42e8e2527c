"""The request ids that a program chose itself, so that its own retry sends nothing twice.

The last 10 000 are remembered, also in the store; for how long depends on how many follow. The id of a
permanently refused message is forgotten, so that a retry may send the message.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import RequestName, put, remove
from strata.channels.reliable.errors import RequestIdInUse
from strata.channels.segmentation.messages import MAX_REQUEST_ID_BYTES

__all__ = ["RequestNames", "check_request_id"]

_MAX_REMEMBERED = 10_000


def check_request_id(request_id: str) -> str:
    """Return a request id that a program chose. Raises `ValueError` if it is empty or too long."""
    if not 0 < len(request_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise ValueError(f"a request id has 1 to {MAX_REQUEST_ID_BYTES} bytes")
    return request_id


class RequestNames:
    """Request ids and the hashes of their messages, oldest first."""

    def __init__(self, stored: Iterable[RequestName] = ()) -> None:
        """`stored` are the records of an earlier run."""
        self._names: OrderedDict[str, bytes] = OrderedDict(
            (record.request_id, record.message_hash) for record in stored
        )
        self._changes: list[Change] = []

    def is_repeated(self, request_id: str, message_hash: bytes) -> bool:
        """Whether this message had this id before. Raises `RequestIdInUse` if another message had it."""
        known = self._names.get(request_id)
        if known is not None and known != message_hash:
            raise RequestIdInUse(request_id)
        return known is not None

    def add(self, request_id: str, message_hash: bytes) -> None:
        """Remember an id, and forget the oldest if there are too many."""
        self._names[request_id] = message_hash
        self._changes.append(put(RequestName(request_id, message_hash)))
        if len(self._names) > _MAX_REMEMBERED:
            self.forget(next(iter(self._names)))

    def forget(self, request_id: str) -> None:
        """Forget an id, if it is remembered."""
        if self._names.pop(request_id, None) is not None:
            self._changes.append(remove(RequestName, request_id))

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        changes, self._changes = self._changes, []
        return changes
