"""An author whose key is replaced by another."""

from __future__ import annotations

from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet

__all__ = ["NEW", "OLD", "START", "rotation"]

START = 1_760_000_000
OLD = Identity.from_seed(b"\x11" * 32)
NEW = Identity.from_seed(b"\x12" * 32).speaking_for(OLD.did)


def rotation(at: int = START) -> Packet:
    """The packet by which the author replaces the old key by the new one."""
    content = rotate_content(f"{OLD.did}#keys-2", NEW.public_key, replaces=f"{OLD.did}#keys-1", valid_from=at)
    return packets.build(OLD, content, timestamp=at)
