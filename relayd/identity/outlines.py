"""Identity packets and manifests as they are kept in memory: without the parts that are never read again.

A stranger may put ten thousand values into a key event or a document beside those that are read. They stay in
the packet's bytes, which are signed and served, but they are not looked at again: decoded, they would take
thirty times the memory, and push the chains of other authors out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Final, TypeAlias

import msgspec
from strata.protocol.packets import Packet

__all__ = ["OBJECT_BYTES", "outlined", "weight_of"]

_Shape: TypeAlias = "EllipsisType | tuple[_Shape] | Mapping[str, _Shape] | None"
"""The shape of what is read: None for a text or a number, the shape of the elements in a tuple for an array,
the shapes of the members that are read for an object, and `...` for a value of any form."""
_TEXTS: Final = (None,)


def _members(*names: str) -> dict[str, _Shape]:
    """The shape of an object of texts and numbers."""
    return dict.fromkeys(names)


_METHOD: Final[_Shape] = _members(
    "id",
    "type",
    "controller",
    "public_key_hex",
    "public_key_multibase",
    "custody",
    "valid_from",
    "valid_until",
    "revoked_at",
    "usage",
)
_DOCUMENT: Final[_Shape] = {
    **_members("id", "created_at", "prev_did_doc_hash"),
    "verification_method": (_METHOD,),
    "authentication": _TEXTS,
    "assertion": _TEXTS,
    "recovery_policy": {"threshold": None, "key_ids": _TEXTS},
}
_CLIENT_KEY: Final[_Shape] = _members("key_id", "public_key", "valid_from", "valid_until")
_CONTENTS: Final[Mapping[str, Mapping[str, _Shape]]] = {
    "KEY_EVENT": _members(
        "event",
        "key_id",
        "reason",
        "public_key_multibase",
        "valid_from",
        "valid_until",
        "revoked_at",
        "replaces",
    ),
    "RECOVERY_APPROVAL": _members("target_event", "approved_at", "note"),
    "DID_DOCUMENT": {"document": _DOCUMENT},
    "CLIENT_MANIFEST": {
        **_members("client_id", "name", "description", "homepage"),
        "public_keys": (_CLIENT_KEY,),
        "bundle_ids": ...,
    },
}
"""The shape of the content of each type that is kept this way: everything that a reader looks at."""

OBJECT_BYTES: Final = 1024
"""The overhead of a chain, a manifest or a packet, whatever it holds."""
_VALUE_BYTES: Final = 100


def outlined(packet: Packet) -> Packet:
    """The same packet with the same bytes, decoded only as far as it is read.

    Where a text or a number belongs, an array or an object stays, but is empty: a reader still refuses it.
    """
    shape = _CONTENTS.get(packet.content_type)
    if shape is None:
        return packet
    content = _cut(packet.content, {"type": None, **shape})
    return msgspec.structs.replace(packet, value={"content": content})


def weight_of(packet: Packet) -> int:
    """The approximate memory of such a packet, in bytes: its bytes, those that are signed, those of its
    document, and its values."""
    texts = 3 if packet.content_type == "DID_DOCUMENT" else 2
    return texts * packet.size_bytes + _VALUE_BYTES * _count(packet.value) + OBJECT_BYTES


def _cut(value: object, shape: _Shape) -> object:
    """The part of a decoded value that has this shape."""
    if shape is ...:
        return value
    if type(value) is dict:
        named = shape if isinstance(shape, dict) else {}
        return {name: _cut(member, named[name]) for name, member in value.items() if name in named}
    if type(value) is list:
        return [_cut(element, shape[0]) for element in value] if isinstance(shape, tuple) else []
    return value


def _count(value: object) -> int:
    """The values in a decoded packet, none deeper than what a relay admits."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        count += 1
        if type(one) is list:
            waiting.extend(one)
        elif type(one) is dict:
            waiting.extend(one.values())
    return count
