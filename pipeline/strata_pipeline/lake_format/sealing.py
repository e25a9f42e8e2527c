"""Sealing, writing and reading the records of a lake: one canonical form, one hash, one text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn, Protocol, TypeVar

import msgspec
from blake3 import blake3
from strata.protocol import canonical
from strata.protocol.errors import InvalidInput, StrataError

__all__ = ["RECORD_BYTES", "LakeError", "hash_of", "read_sealed", "refuse", "text_of", "with_hash"]


RECORD_BYTES: Final = 2**20
"""The most bytes of a manifest, or of the summary of a day, which have one to three KiB: a lake may be a
stranger's copy, and these files are read as a whole."""


class LakeError(StrataError):
    """The lake is damaged, incomplete, or of a version that this program does not know."""


class _Sealed(Protocol):
    @property
    def hash(self) -> str: ...


class _Head(msgspec.Struct):
    format: int


_Record = TypeVar("_Record", bound=_Sealed)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def hash_of(members: Mapping[str, object]) -> str:
    """BLAKE3-256 of the canonical JSON of all members except `hash`.

    Raises `InvalidInput` for a number outside the range of JSON.
    """
    sealed = {name: value for name, value in members.items() if name != "hash"}
    return blake3(canonical.encode(sealed)).hexdigest()


def with_hash(record: _Struct) -> _Struct:
    """A record with its hash. Raises as `hash_of` does."""
    return msgspec.structs.replace(record, hash=hash_of(msgspec.to_builtins(record)))


def text_of(record: object) -> bytes:
    """The text of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def refuse(name: str, why: str) -> NoReturn:
    """Raise `LakeError` for a record that cannot be used."""
    raise LakeError(f"the lake's {name} cannot be used: {why}")


def read_sealed(text: bytes, record_type: type[_Record], version: int, name: str) -> _Record:
    """Read a record of this version. Raises `LakeError` with this `name` if it cannot be used."""
    try:
        found = msgspec.json.decode(text, type=_Head).format
        if found != version:
            refuse(
                name,
                f"its format is {found} and this program reads {version} alone: archive the log anew into "
                "another folder, or read this lake with the program that wrote it",
            )
        record = msgspec.json.decode(text, type=record_type)
        recomputed = hash_of(msgspec.to_builtins(record))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidInput) as error:
        refuse(name, f"it is damaged: {error}")
    if record.hash != recomputed:
        refuse(name, "it was changed after it was written: its hash does not recompute")
    return record
