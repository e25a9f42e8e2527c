"""Declined packets, which are not served: a predicate on a packet in memory, and SQL conditions on its row.

A media hash counts wherever an object of the packet has it as `media_hash`. Canonical JSON has only one
spelling of such a member, and a string cannot contain that spelling, because its quotes would be escaped. So
the body is searched as bytes, and never decoded.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from strata.protocol.fields import CONTENT_ID

from relayd.store.columns import string_key
from relayd.store.types import Declined, NewPacket

__all__ = ["DECLINED_CONDITIONS", "covers", "declined_parameters", "refers_to"]

_MEDIA_HASH: Final = re.compile(f'"media_hash":"({CONTENT_ID})"'.encode())

DECLINED_CONDITIONS: Final = {
    "declined_authors": "p.author_id <> ALL ({}::bytea[])",
    "declined_types": "p.content_type <> ALL ({}::bytea[])",
    "declined_ids": "p.packet_id <> ALL ({}::bytea[])",
    # The text after the name is compared up to the closing quote. The part before the first name begins as a
    # packet does, so it is not a hash.
    "declined_media": (
        "NOT EXISTS (SELECT FROM string_to_table(encode(p.body, 'escape'), '\"media_hash\":\"') AS part"
        " WHERE left(part, 67) = ANY ({}::text[]))"
    ),
}
"""The conditions on a row of `packets AS p`; each takes the parameter of the same name."""


@functools.lru_cache(maxsize=4)
def declined_parameters(declined: Declined) -> Mapping[str, object]:
    """The parameters of the conditions that `declined` needs; none if nothing is declined."""
    parameters: dict[str, object] = {
        "declined_authors": [string_key(author) for author in declined.authors],
        "declined_types": [string_key(type_) for type_ in declined.types],
        "declined_ids": list(declined.packet_ids),
        "declined_media": [media_hash + '"' for media_hash in declined.media_hashes],
    }
    return {name: values for name, values in parameters.items() if values}


def covers(declined: Declined, packet: NewPacket) -> bool:
    """Whether the packet is declined."""
    return (
        packet.author_id in declined.authors
        or packet.content_type in declined.types
        or packet.packet_id in declined.packet_ids
        or (bool(declined.media_hashes) and refers_to(packet.body, declined.media_hashes))
    )


def refers_to(body: bytes, media_hashes: frozenset[str]) -> bool:
    """Whether the canonical packet names one of these media hashes."""
    return any(found.decode() in media_hashes for found in _MEDIA_HASH.findall(body))
