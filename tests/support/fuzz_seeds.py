"""The starting points of fuzzing: one good input of each kind, so that chance need not find them."""

from __future__ import annotations

from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.negentropy import ItemSet, Reconciler

from relayd.cursor import CursorCodec

__all__ = ["seeds_of"]

_PACKET = packets.build(
    Identity(bytes(range(32))), {"type": "POST", "text": "ü\U0001f980", "weights": [1.5, 100]}, timestamp=1
).canonical
_SUBSCRIBE = (
    b'{"type":"SUBSCRIBE","subscription_id":"s","filters":{"authors":["did:strata:z"],"types":["A"],'
    b'"since":1,"until":2,"limit":3,"cursor":null,"order":"desc","packet_ids":[]},"gapless":false}'
)
_MESSAGES = [
    _SUBSCRIBE,
    b'{"type":"UNSUBSCRIBE","subscription_id":"s","client_msg_id":"m"}',
    b'{"type":"PUBLISH","packet":' + _PACKET + b"}",
    b'{"type":"AUTH","author_id":"a","challenge":"c","signature":"0x","capabilities":[]}',
    b'{"type":"RECONCILE","message":"6100000200","since":0,"until":9,"unexpired_at":5,"types":["A"],"authors":[]}',
]
_ITEMS = ItemSet((n, bytes([n]) * 32) for n in range(100))


def _frame(data: bytes, first: int = 0x81) -> bytes:
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([first]) + length + b"abcd" + data


def seeds_of(name: str) -> list[bytes]:
    """Good inputs for the harness of this name."""
    match name:
        case "canonical" | "packet":
            return [_PACKET, b'{"a":[1.0,-0.0,1e21],"\xef\xac\xb3":null}']
        case "message":
            return _MESSAGES
        case "session":
            return [b"\n".join(_MESSAGES)]
        case "frames":
            return [b"\x07" + _frame(b"x" * 5) + _frame(b"", 0x89) + _frame(b"y" * 300) + _frame(b"z", 0x01)]
        case "negentropy":
            first, few = Reconciler(_ITEMS).initiate(), ItemSet([(5, bytes(32))])
            return [first, Reconciler(few).initiate(), Reconciler(few).respond(first)]
        case "cursor":
            codec = CursorCodec(bytes(32))
            return [codec.encode(5).encode(), codec.encode(5, ascending=False).encode()]
    raise KeyError(name)
