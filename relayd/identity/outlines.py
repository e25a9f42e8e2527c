"""Identity packets and manifests as they are kept in memory: without what nobody reads again.

What a key event says are texts and numbers, and a manifest has two members that are more. A stranger may nest
ten thousand values beside these. They stay in the packet's bytes, which are signed, served and looked at no
further; decoded they would take thirty times the memory, and push the chains of others out of it.
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
"""The types that are kept so, each with the members of its content whose insides are read."""
OBJECT_BYTES: Final = 1024
"""What goes with a chain, a manifest or a packet, whatever is in it."""
_VALUE_BYTES: Final = 100


def outlined(packet: Packet) -> Packet:
    """The same packet, its bytes too; members that nobody looks into are empty.

    They stay what they are, an array or an object: whoever finds one where a text has to be still refuses it.
    """
    read = _READ.get(packet.content_type)
    if read is None:
        return packet
    content = {name: value if name in read else _emptied(value) for name, value in packet.content.items()}
    value = {name: _emptied(member) for name, member in packet.value.items()} | {"content": content}
    return msgspec.structs.replace(packet, value=value)


def weight_of(packet: Packet) -> int:
    """About what such a packet takes in memory, in bytes: its own, those that are signed, and its values."""
    is_outlined = packet.content_type in _READ
    # Of a large document they are not counted one by one.
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
