"""Whether a packet of a lake is valid: its id, its columns, and its signature under a key valid at the time.

The identity packets of the lake, replayed as a relay replays its log, show which keys were valid; an author
without any has the key in the DID. As in a relay, the time of a packet is that at which the first relay
received it. Keys from a relay's configuration come from the same bootstrap file.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import public_key_from_did, verify
from strata.protocol.keys import IDENTITY_TYPES, KeyChain, KeyRules
from strata.protocol.packets import Packet
from strata.relays.bootstrap import Bootstrap, read_bootstrap

from strata_pipeline.bodies import read_body, signed_bytes
from strata_pipeline.datasets import Packets
from strata_pipeline.errors import UsageError
from strata_pipeline.lake.witnesses import ReceivedAt, as_received
from strata_pipeline.transforms.checking import columns_fault, explain

__all__ = ["AuthorShare", "SigningKeys", "identity_packets", "keys_by_authors", "packet_fault"]

_KEYS_BYTES = 128 * 2**20
_EVENT_BYTES = 200
"""The memory that Python needs for an identity packet beside its strings."""
_Events = Mapping[str, list[tuple[bytes, int]]]


class AuthorShare(NamedTuple):
    """A share of all authors, by a checksum of their names that Spark and Python both have."""

    number: int = 0
    among: int = 1

    def have(self, author_id: str | None) -> bool:
        """Whether an author is in the share; None, from a damaged row, is also in exactly one share."""
        return self.among == 1 or zlib.crc32((author_id or "").encode()) % self.among == self.number

    def are(self, column: str) -> Column:
        """The same condition for the names in a column."""
        name = F.coalesce(F.col(column), F.lit("")).cast("binary")
        return F.crc32(name) % self.among == self.number


@dataclass
class SigningKeys:
    """The keys that may sign for each DID. It is sent to executors, which build each chain when first
    needed."""

    events: _Events
    """The identity packets of each DID, with the time of their first receipt in Unix seconds."""
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    _chains: dict[str, KeyChain] = field(default_factory=dict)

    @classmethod
    def of(cls, packets: Packets, bootstrap: Path | None = None) -> SigningKeys:
        """The keys in identity packets and in a bootstrap file. Raises `UsageError` for a bad file."""
        return cls(_events_of(identity_packets(packets)), _read_bootstrap(bootstrap))

    def plain_key(self, did: str) -> bytes | None:
        """The key in the DID of an author without other keys; None for other authors."""
        if did in self.events or did in self.bootstrap.keys or did in self.bootstrap.documents:
            return None
        return _key_in(did)

    def verify(self, packet: Packet, received_at: int) -> None:
        """Raise `InvalidPacket` unless the signature counts for this time of receipt."""
        self._chain(packet.author_id).verify(packet, received_at, ingest=False)

    def _chain(self, did: str) -> KeyChain:
        chain = self._chains.get(did)
        if chain is None:
            chain = self._chains[did] = KeyChain.replay(
                did,
                [
                    (packet, at)
                    for body, at in self.events.get(did, ())
                    if (packet := _parsed(body)) is not None
                ],
                documents=self.bootstrap.documents.get(did, ()),
                static_key=self.bootstrap.keys.get(did),
                rules=KeyRules(clock_skew_seconds=self.bootstrap.clock_skew_seconds),
            )
        return chain


def keys_by_authors(
    identities: Packets,
    bootstrap: Path | None = None,
    *,
    received: ReceivedAt = as_received,
    most_bytes: int = _KEYS_BYTES,
) -> Iterator[tuple[AuthorShare, SigningKeys]]:
    """The authors, one share at a time, each with the keys that may sign for these authors.

    There are as many shares as needed for the packets in `identities` about the keys of one share to have at
    most about `most_bytes`, which are in memory here and in each task. Usually there is one. Raises
    `UsageError` for a bad bootstrap file, and what `received` raises.
    """
    told = _read_bootstrap(bootstrap)
    events = identity_packets(identities)
    size = events.agg(F.sum(F.length("body") + F.length("author_id") + _EVENT_BYTES)).collect()[0][0] or 0
    among = max(1, -(-size // most_bytes))
    for number in range(among):
        authors = AuthorShare(number, among)
        yield (
            authors,
            SigningKeys(_events_of(events.where(authors.are("author_id")), received) if size else {}, told),
        )


def _events_of(rows: DataFrame, received: ReceivedAt = as_received) -> _Events:
    """The identity packets of each author, in the order of the rows: read by all tasks at once, and not
    partition by partition."""
    events: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    table = rows.toArrow()
    at = received(*(table[name].combine_chunks() for name in ("sequence", "received_at")))
    table = table.set_column(table.schema.get_field_index("received_at"), "received_at", at)
    for batch in table.to_batches():
        columns = (batch.column(name).to_pylist() for name in ("author_id", "body", "received_at"))
        for author_id, body, received_at in zip(*columns, strict=True):
            events[author_id].append((body, received_at))
    return dict(events)


def _read_bootstrap(path: Path | None) -> Bootstrap:
    try:
        return Bootstrap() if path is None else read_bootstrap(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"the bootstrap file {path}: {error}") from None


def identity_packets(packets: Packets) -> DataFrame:
    """The packets that introduce and revoke keys."""
    types = sorted(IDENTITY_TYPES)
    return packets.frame.where(F.col("content_type").isin(types)).select(
        "sequence", "author_id", "body", "received_at"
    )


def packet_fault(
    keys: SigningKeys,
    received_at: int | None,
    packet_id: bytes | None,
    body: bytes | None,
    author_id: str,
    content_type: str,
    timestamp: int,
    expires_at: int | None,
) -> tuple[str, str] | None:
    """The fault of a packet, including that of its signature, as a word and a sentence; None for none."""
    if body is None or packet_id is None or received_at is None:
        return "null", "a row without a body, an id or a time"
    told = read_body(body)
    signed = None if told is None else signed_bytes(body, packet_id, told)
    if told is None or signed is None:
        fault = explain(body, packet_id)
        if fault is not None or told is None:
            return fault or ("unreadable", "the body lacks what every packet has")
    fault = columns_fault(told, author_id, content_type, timestamp, expires_at)
    if fault is not None:
        return fault
    key = keys.plain_key(author_id)
    if signed is not None and key is not None and content_type not in IDENTITY_TYPES:
        holds = verify(key, signed, bytes.fromhex(told.signature[2:]))
        return None if holds else ("invalid_signature", "the signature does not verify")
    try:
        keys.verify(Packet.read(body), received_at)
    except InvalidPacket as error:
        return error.detail or str(error.code), error.reason
    return None


def _parsed(body: bytes) -> Packet | None:
    try:
        return Packet.read(body)
    except InvalidPacket:
        return None  # it is reported as a packet, and gives nobody a key


@functools.lru_cache(maxsize=65_536)
def _key_in(did: str) -> bytes | None:
    return public_key_from_did(did)
