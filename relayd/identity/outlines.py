"""Identity packets and manifests as they are kept in memory: without the parts that are never read again.

A key event consists of texts and numbers, and a manifest has two members that hold more. A stranger may nest
ten thousand values beside these. They stay in the packet's bytes, which are signed and served, but they are
not looked at again: decoded, they would take thirty times the memory, and push the chains of other authors
out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from strata.protocol import canonical
from strata.protocol.packets import Packet

__all__ = ["OBJECT_BYTES", "outlined", "weight_of"]

_READ: Final[Mapping[str, frozenset[str]]] = {
    "KEY_EVENT": frozenset(),
    "RECOVERY_APPROVAL": frozenset(),
    "CLIENT_MANIFEST": frozenset({"public_keys", "bundle_ids"}),
}
"""The types kept this way, each with the members of its content whose insides are read."""
OBJECT_BYTES: Final = 1024
"""The overhead of a chain, a manifest or a packet, whatever it holds."""
_VALUE_BYTES: Final = 100


def outlined(packet: Packet) -> Packet:
    """The same packet with the same bytes; members that are never looked into are empty.

    They keep their kind, array or object, so that a reader that requires a text there still refuses them.
    """
    read = _READ.get(packet.content_type)
    if read is None:
        return packet
    content = {name: value if name in read else _emptied(value) for name, value in packet.content.items()}
    value = {name: _emptied(member) for name, member in packet.value.items()} | {"content": content}
    return msgspec.structs.replace(packet, value=value)


def weight_of(packet: Packet) -> int:
    """The approximate memory of such a packet, in bytes: its bytes, those that are signed, and its values."""
    is_outlined = packet.content_type in _READ
    # The values of a large document are not counted one by one.
    values = _count(packet.value) if is_outlined else canonical.most_values(packet.canonical)
    return 2 * packet.size_bytes + _VALUE_BYTES * values + OBJECT_BYTES


def _emptied(value: object) -> object:
    if type(value) is list:
        return []
    return {} if type(value) is dict else value


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
