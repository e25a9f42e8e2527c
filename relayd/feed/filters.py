"""Filters, compiled once when a subscription opens (RFC-0004 §3.1, decisions A-042 and A-051).

A compiled filter answers two questions in the same sense: whether a live packet matches (`matches`), and
which rows of the log match (`query`). Equal filters compare and hash equal, so that a thousand subscribers
to the same packets cost one match.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.protocol.errors import InvalidMessage
from strata.protocol.fields import is_content_id
from strata.protocol.ids import MAX_DID_CHARACTERS
from strata.protocol.wire import Filters

from relayd.store.types import LogEntry, LogQuery

__all__ = ["MAX_TYPE_BYTES", "CompiledFilter", "compile_filter"]

MAX_TYPE_BYTES = 4096
"""The longest content type that can be subscribed to; packets may have longer ones."""

_FILTER_BYTES, _VALUE_BYTES = 1024, 400
"""The further memory of a filter and of each of its values: in its set, and on a shelf of the index."""


@dataclass(frozen=True, slots=True)
class CompiledFilter:
    """The packets a subscription wants. Empty sets restrict nothing; bounds are inclusive Unix seconds."""

    authors: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    packet_ids: frozenset[bytes] = frozenset()
    since: int | None = None
    received_since: int | None = None
    received_until: int | None = None
    not_peers: frozenset[int] = frozenset()
    """Peers whose packets the subscriber gets elsewhere (`not_via`)."""
    kept_bytes: int = field(default=_FILTER_BYTES, compare=False)
    """The approximate memory of the filter while it is open. One character outside Latin-1 doubles or
    quadruples the size of a string, so this is no multiple of the bytes that were sent."""

    def matches(self, entry: LogEntry) -> bool:
        """Whether a live packet is wanted. `until` bounds only history (R-148), so it plays no part here."""
        packet = entry.packet
        return (
            (not self.authors or packet.author_id in self.authors)
            and (not self.types or packet.content_type in self.types)
            and (not self.packet_ids or packet.packet_id in self.packet_ids)
            and (self.since is None or packet.timestamp >= self.since)
            and (self.received_since is None or entry.filtered_at >= self.received_since)
            and (self.received_until is None or entry.filtered_at <= self.received_until)
            and packet.ingest_peer not in self.not_peers
        )

    def query(
        self, *, after: int = 0, up_to: int | None = None, ascending: bool = True, until: int | None = None
    ) -> LogQuery:
        """The same question for the log, restricted to rows with `after < sequence <= up_to`."""
        return LogQuery(
            after=after,
            up_to=up_to,
            ascending=ascending,
            authors=self.authors,
            types=self.types,
            packet_ids=self.packet_ids,
            since=self.since,
            until=until,
            received_since=self.received_since,
            received_until=self.received_until,
            not_peers=self.not_peers,
        )


def compile_filter(
    filters: Filters, *, max_values: int, peers: Mapping[str, int] | None = None
) -> CompiledFilter:
    """Compile the filters of a SUBSCRIBE. `peers` maps relays that this relay reads from to their numbers,
    if the subscriber may leave out their packets with `not_via`.

    Raises `InvalidMessage` (without ids, which the caller knows) for a malformed packet id, for an author or
    a type that is too long, or for more than `max_values` values in all.
    """
    authors, types, packet_ids = filters.authors or (), filters.types or (), filters.packet_ids or ()
    if len(authors) + len(types) + len(packet_ids) + len(filters.not_via or ()) > max_values:
        raise InvalidMessage(
            f"more than {max_values} authors, types and packet ids", detail="too_many_filter_values"
        )
    for packet_id in packet_ids:
        if not is_content_id(packet_id):
            raise InvalidMessage("packet_ids must be 0x and 64 lowercase hex digits", detail="packet_ids")
    if authors and max(map(len, authors)) > MAX_DID_CHARACTERS:
        raise InvalidMessage(f"a DID has at most {MAX_DID_CHARACTERS} characters", detail="authors")
    # A character takes at most four bytes, so short types need not be encoded to be measured.
    long = [type_ for type_ in types if len(type_) > MAX_TYPE_BYTES // 4]
    if any(len(type_.encode()) > MAX_TYPE_BYTES for type_ in long):
        raise InvalidMessage(f"a type in a filter has at most {MAX_TYPE_BYTES} bytes", detail="types")
    wanted_authors, wanted_types = frozenset(authors), frozenset(types)
    wanted_ids = frozenset(bytes.fromhex(packet_id[2:]) for packet_id in packet_ids)
    count = len(wanted_authors) + len(wanted_types) + len(wanted_ids)
    sizes = sum(map(str.__sizeof__, wanted_authors)) + sum(map(str.__sizeof__, wanted_types))
    return CompiledFilter(
        authors=wanted_authors,
        types=wanted_types,
        packet_ids=wanted_ids,
        kept_bytes=_FILTER_BYTES + sizes + sum(map(bytes.__sizeof__, wanted_ids)) + _VALUE_BYTES * count,
        since=filters.since,
        received_since=filters.received_since,
        received_until=filters.received_until,
        not_peers=frozenset(peers[did] for did in filters.not_via or () if did in peers)
        if peers
        else frozenset(),
    )
