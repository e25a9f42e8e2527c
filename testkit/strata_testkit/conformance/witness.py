"""The rules for every message that a relay sends, watched over a whole run.

Some rows are not about any particular exchange: every ERROR has a code and a reason, every EVENT has a
`received_at`, every packet served is whole. `Witness.see` examines each message of each connection, whichever
check it belongs to, and keeps the first breach of each row; the concluding checks report them.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re

import msgspec
from strata.protocol import canonical
from strata.protocol.errors import InvalidInput
from strata.protocol.fields import is_content_id
from strata.protocol.packets import Packet
from strata.protocol.wire import MAX_ID_BYTES

from strata_testkit.conformance.verdicts import Message, shorten

__all__ = ["Witness"]

_is_snake_case = re.compile(r"[a-z][a-z0-9_]*").fullmatch
_leaks = re.compile(
    r"Traceback|\bFile \"|\bSELECT\b|\bINSERT\b|psycopg|asyncpg|sqlite|/home/|/usr/|(?:0x)?[0-9a-f]{64}"
).search


class _Raw(msgspec.Struct):
    packet: msgspec.Raw = msgspec.Raw()


_decode_raw = msgspec.json.Decoder(_Raw).decode


class Witness:
    """The breaches of rows about every message, each described by the first message that showed it.

    `errors` and `events` count the messages seen, so that a concluding check can distinguish "all were right"
    from "there were none". `packets` counts the packets that were verified.
    """

    def __init__(self) -> None:
        self.breaches: dict[str, str] = {}
        self.errors = 0
        self.events = 0
        self.packets = 0

    def see(self, message: Message, text: str) -> None:
        """Examine one message; `text` is the frame that contained it."""
        for name in _member_names({key: value for key, value in message.items() if key != "packet"}):
            if not _is_snake_case(name):
                self._breach("R-003", f"a member named {shorten(name)}")
        match message.get("type"):
            case "EVENT":
                self._event(message, text)
            case "ERROR":
                self._error(message)
            case "OK" if not is_content_id(str(message.get("packet_id"))):
                self._breach("R-020", f"an OK with packet_id {shorten(message.get('packet_id'))}")

    def _event(self, message: Message, text: str) -> None:
        self.events += 1
        if type(message.get("received_at")) is not int:
            self._breach("R-098", f"an EVENT with received_at {shorten(message.get('received_at'))}")
        if not isinstance(message.get("subscription_id"), str):
            self._breach("R-172", "an EVENT without the subscription_id it is due to")
        packet = message.get("packet")
        if not isinstance(packet, dict) or not is_content_id(str(packet.get("packet_id"))):
            self._breach("R-171", f"an EVENT whose packet has no well-formed id: {shorten(packet)}")
            return
        try:
            _verify(packet, text, message.get("relay_annotations"))
        except (InvalidInput, msgspec.MsgspecError) as error:
            self._breach("R-171", f"the packet {packet['packet_id']}: {shorten(str(error))}")
        else:
            self.packets += 1

    def _error(self, message: Message) -> None:
        self.errors += 1
        reason = message.get("reason")
        if not isinstance(message.get("code"), str) or not isinstance(reason, str) or not reason:
            self._breach("R-195", f"an ERROR without code or reason: {shorten(message)}")
        elif leak := _leaks(reason):
            self._breach("R-199", f"a reason that holds {shorten(leak[0])}")
        name = message.get("client_msg_id")
        if isinstance(name, str) and len(name.encode()) > MAX_ID_BYTES:
            self._breach("R-137", "an ERROR that echoes an overlong client_msg_id")

    def _breach(self, row: str, what: str) -> None:
        self.breaches.setdefault(row, what)


def _verify(packet: dict[str, object], text: str, annotations: object) -> None:
    """Raise `InvalidInput` unless the packet's id and schema are valid.

    Signatures by keys other than the author's own belong to section 5, so signatures are not judged here.
    A downgraded packet is judged as it was signed (A-077).
    """
    note = annotations.get("provenance") if isinstance(annotations, dict) else None
    if isinstance(note, dict) and isinstance(note.get("original_provenance_header"), dict):
        raw = canonical.encode({**packet, "provenance_header": note["original_provenance_header"]})
    else:
        raw = bytes(_decode_raw(text).packet)
    Packet.parse(raw, media_needs_header=False)


def _member_names(value: object) -> list[str]:
    if isinstance(value, dict):
        inner = [
            name
            for key, item in value.items()
            if key != "original_provenance_header"
            for name in _member_names(item)
        ]
        return [*value, *inner]
    if isinstance(value, list):
        return [name for item in value for name in _member_names(item)]
    return []
