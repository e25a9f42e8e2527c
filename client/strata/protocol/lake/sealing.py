"""How every record of a lake is sealed and written: one canonical form, one hash, one text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from blake3 import blake3

from strata.protocol import canonical

__all__ = ["hash_of", "text_of"]


def hash_of(members: Mapping[str, object]) -> str:
    """BLAKE3-256 of the canonical JSON of all members but `hash`. Raises `InvalidInput` for a number beyond
    those of JSON."""
    sealed = {name: value for name, value in members.items() if name != "hash"}
    return blake3(canonical.encode(sealed)).hexdigest()


def text_of(record: object) -> bytes:
    """The text of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
