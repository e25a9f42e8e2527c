"""Inputs for a relay, drawn from a grammar of RFC-0004 and of packets: good ones first, then spoiled ones.

An input is what one connection sends. It is spoiled at one or more levels: members before the packet is
signed, members after that, members of the message, the text of the JSON, the bytes, the frames. `$challenge`
and `$proof` stand for values that only the connection knows: the relay's challenge and the answer to it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity
from strata.protocol.negentropy import ItemSet, Reconciler
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode

from tests.support.made_packets import seal

__all__ = ["FUZZER", "LEVELS", "TYPES", "Input", "Piece", "draw", "from_json", "kinds_of"]

FUZZER: Final = Identity(b"fuzz" * 8)
"""The identity that authenticates."""
LEVELS: Final = ("good", "signed", "packet", "message", "text", "bytes", "frames")
"""The levels at which an input can be spoiled."""
_MOST_PIECES: Final = 8
_Value = Any


@dataclass(frozen=True)
class Piece:
    """A text message in this number of fragments; or, if `raw`, bytes that go to the socket unchanged."""

    data: bytes
    raw: bool = False
    fragments: int = 1

    def on_the_wire(self, data: bytes) -> bytes:
        """The bytes that carry `data`, which is this piece's with its placeholders filled."""
        if self.raw:
            return data
        size = max(1, -(-len(data) // self.fragments))
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        return b"".join(
            WireFrame(Opcode.CONT if at else Opcode.TEXT, part, fin=at == len(parts) - 1).serialize(mask=True)
            for at, part in enumerate(parts)
        )


@dataclass(frozen=True)
class Input:
    """What one connection sends, in writes of at most `step` bytes."""

    pieces: tuple[Piece, ...]
    step: int = 2**16
    levels: tuple[str, ...] = ()

    @property
    def is_framed(self) -> bool:
        """Whether all of it is sent in well-formed frames."""
        return not any(piece.raw for piece in self.pieces)

    def as_json(self) -> str:
        """The form for the corpus, which `from_json` reads."""
        pieces = []
        for piece in self.pieces:
            try:
                what = {"text": piece.data.decode()}
            except UnicodeDecodeError:
                what = {"hex": piece.data.hex()}
            if piece.raw:
                what = {"hex": piece.data.hex()}
            pieces.append({**what, "raw": piece.raw, "fragments": piece.fragments})
        return json.dumps({"step": self.step, "pieces": pieces}, indent=1) + "\n"


def from_json(text: str) -> Input:
    """Read an input of the corpus."""
    value = json.loads(text)
    pieces = [
        Piece(
            bytes.fromhex(piece["hex"]) if "hex" in piece else piece["text"].encode(),
            piece["raw"],
            piece["fragments"],
        )
        for piece in value["pieces"]
    ]
    return Input(tuple(pieces), value["step"], ("corpus",))


def draw(chance: random.Random, now: int) -> Input:
    """Draw one input. The same `chance` and time make the same input."""
    level = chance.choice(LEVELS)
    levels = {level} | ({chance.choice(LEVELS)} if chance.random() < 0.2 else set())
    world = _World(chance, now, levels)
    pieces = [world.piece() for _ in range(chance.randint(1, _MOST_PIECES))]
    if "frames" in levels:
        pieces.insert(chance.randint(0, len(pieces)), _bad_frames(chance, pieces))
    size = sum(len(piece.data) for piece in pieces)
    step = chance.choice([max(1, size // 300), max(1, size // 20), 2**16, 2**16])
    return Input(tuple(pieces), step, tuple(sorted(levels)))


class _World:
    """What the messages of one input have in common: authors, packets, names."""

    def __init__(self, chance: random.Random, now: int, levels: set[str]) -> None:
        self.chance = chance
        self.now = now
        self.levels = levels
        self.authors = [Identity(chance.randbytes(32)) for _ in range(2)]
        self.types = chance.sample(list(TYPES), 3)  # few, so that packets of one type meet
        self.packets: list[dict[str, Any]] = []
        self.count = 0
        self.replicates = chance.random() < 0.2
        """Whether it begins like a peer and compares sets most of the time."""

    def piece(self) -> Piece:
        """The next message, possibly spoiled."""
        chance = self.chance
        kind = chance.choice(list(_MESSAGES))
        if self.replicates and (self.count == 0 or chance.random() < 0.6):
            kind = "RECONCILE" if self.count else "AUTH"
        message = _MESSAGES[kind](self)
        self.count += 1
        message["client_msg_id"] = f"q{self.count}"
        if "message" in self.levels:
            _spoil(chance, message)
        text = _dumps(message)
        if "text" in self.levels:
            text = _respell(chance, text)
        data = text.encode("utf-8", "surrogatepass")
        if "bytes" in self.levels:
            data = _scramble(chance, data)
        return Piece(data, fragments=chance.choice([1, 1, 1, 2, 5]))

    def author(self) -> Identity:
        return self.chance.choice(self.authors)

    def packet_id(self) -> str:
        if self.packets and self.chance.random() < 0.7:
            return str(self.chance.choice(self.packets).get("packet_id"))
        return "0x" + self.chance.randbytes(32).hex()


# Messages.


def _publish(world: _World) -> dict[str, Any]:
    if world.packets and world.chance.random() < 0.15:
        return {"type": "PUBLISH", "packet": world.chance.choice(world.packets)}
    author = world.author()
    content = TYPES[world.chance.choice(world.types)](world, author)
    packet: dict[str, Any] = {
        "version": 1,
        "timestamp": world.now - world.chance.choice([0, 0, 1, 60]),
        "author_id": author.did,
        "content": content,
    }
    if world.chance.random() < 0.5:
        packet["nonce"] = world.chance.randbytes(8).hex()
    if world.chance.random() < 0.3 or content.get("media"):
        packet["provenance_header"] = _header(world)
    if "signed" in world.levels:
        for _ in range(world.chance.randint(1, 2)):
            _spoil(world.chance, packet)
    try:
        packet = json.loads(seal(author, packet))
    except (StrataError, ValueError, OverflowError, RecursionError, TypeError, UnicodeError):
        packet |= {"packet_id": world.packet_id(), "signature": "0x" + "5a" * 64}
    if "packet" in world.levels:
        _spoil(world.chance, packet)
    world.packets.append(packet)
    return {"type": "PUBLISH", "packet": packet}


def _subscribe(world: _World) -> dict[str, Any]:
    chance = world.chance
    known: dict[str, Callable[[], _Value]] = {
        "authors": lambda: [world.author().did for _ in range(chance.randint(0, 3))],
        "types": lambda: chance.sample(list(TYPES), chance.randint(0, 3)),
        "since": lambda: world.now - chance.choice([0, 100, 10**6]),
        "until": lambda: world.now + chance.choice([0, 100]),
        "received_since": lambda: world.now - 100,
        "received_until": lambda: world.now + 100,
        "limit": lambda: chance.choice([0, 1, 20, 500]),
        "order": lambda: chance.choice(["asc", "desc"]),
        "packet_ids": lambda: [world.packet_id() for _ in range(chance.randint(0, 3))],
        "cursor": lambda: "1." + chance.randbytes(18).hex()[:24],
    }
    chosen = chance.sample(list(known), chance.choice([0, 1, 1, 2, 3]))
    message: dict[str, Any] = {
        "type": "SUBSCRIBE",
        "subscription_id": chance.choice(["a", "b", "c" * 100]),
        "filters": {"limit": 20} | {name: known[name]() for name in chosen},
        "history_marker": True,
    }
    if chance.random() < 0.2:
        message["gapless"] = True
        message["filters"].pop("limit", None)
        message["filters"].pop("order", None)
    return message


def _unsubscribe(world: _World) -> dict[str, Any]:
    return {"type": "UNSUBSCRIBE", "subscription_id": world.chance.choice(["a", "b", "x"])}


def _auth(world: _World) -> dict[str, Any]:
    message: dict[str, Any] = {
        "type": "AUTH",
        "author_id": FUZZER.did,
        "challenge": "$challenge",
        "signature": "$proof",
    }
    if world.replicates:
        message["capabilities"] = ["publish", "subscribe", "replicate"]
    elif world.chance.random() < 0.3:
        message["capabilities"] = world.chance.choice([["publish"], [], ["publish", "subscribe", "x"]])
    return message


def _reconcile(world: _World) -> dict[str, Any]:
    """A RECONCILE that begins a comparison of what was published here, or one that may follow it."""
    chance = world.chance
    message: dict[str, Any] = {"type": "RECONCILE", "message": _negentropy(world).hex()}
    if chance.random() < 0.7:
        message["until"] = world.now + chance.choice([-100, 0, 3600])
        known: dict[str, Callable[[], _Value]] = {
            "since": lambda: world.now - chance.choice([0, 100, 10**6]),
            "unexpired_at": lambda: world.now + chance.choice([-100, 0, 300]),
            "types": lambda: chance.sample(list(TYPES), chance.randint(0, 3)),
            "authors": lambda: [world.author().did for _ in range(chance.randint(0, 2))],
        }
        for name in chance.sample(list(known), chance.choice([0, 1, 2])):
            message[name] = known[name]()
    return message


def _negentropy(world: _World) -> bytes:
    """A message that opens a comparison, one of drawn ranges, or either with other bytes in it."""
    chance = world.chance
    if chance.random() < 0.4:
        ids = {chance.randbytes(32) for _ in range(chance.choice([0, 1, 40, 200]))}
        items = ItemSet((world.now - chance.randint(0, 5000), packet_id) for packet_id in ids)
        data = Reconciler(items, max_frame_bytes=30_000, shift=chance.getrandbits(30)).initiate()
    else:
        data = b"\x61" + b"".join(_range(world) for _ in range(chance.choice([0, 1, 3, 60])))
    while chance.random() < 0.3:
        data = _scramble(chance, data)
    return data


def _range(world: _World) -> bytes:
    """A bound, a mode and its payload, as the protocol writes them, or with one number wrong."""
    chance = world.chance
    at = chance.choice([0, 1, 5, world.now, 2**53, 2**64 - 1])
    prefix = chance.randbytes(chance.choice([0, 0, 1, 31, 32, 33]))
    mode = chance.choice([0, 1, 1, 1, 2, 2, 3])
    payload = b""
    if mode == 1:
        payload = chance.randbytes(chance.choice([16, 16, 16, 15]))
    elif mode == 2:
        count = chance.choice([0, 1, 20])
        said = chance.choice([count, count, count, count + 1, 2**63])
        payload = _digits(said) + chance.randbytes(32 * count)
    return _digits(at) + _digits(len(prefix)) + prefix + _digits(mode) + payload


def _digits(number: int) -> bytes:
    digits = [number & 127]
    while number := number >> 7:
        digits.append(number & 127 | 128)
    return bytes(reversed(digits))


_MESSAGES: Final[Mapping[str, Callable[[_World], dict[str, Any]]]] = {
    "PUBLISH": _publish,
    "PUBLISH again": _publish,
    "PUBLISH once more": _publish,
    "SUBSCRIBE": _subscribe,
    "UNSUBSCRIBE": _unsubscribe,
    "AUTH": _auth,
    "RECONCILE": _reconcile,
}


# Packets, by the type of their content.


def _post(world: _World, author: Identity) -> dict[str, Any]:
    texts = ["", "hello", "ü\U0001f980", "\u0000", "\u2028", "x" * 2000, "ﬀ"]
    content: dict[str, Any] = {"type": "POST", "text": world.chance.choice(texts)}
    if world.chance.random() < 0.3:
        content["numbers"] = [world.chance.choice(_GOOD_NUMBERS) for _ in range(5)]
    if world.chance.random() < 0.2:
        content["media"] = [{"media_hash": "0x" + "ab" * 32, "media_type": "image/png"}]
    return content


def _edge(world: _World, author: Identity) -> dict[str, Any]:
    return {
        "type": "TRUST_EDGE",
        "from": author.did,
        "to": world.author().did,
        "strength": world.chance.choice([0, 0.3, 0.5, 1, 1.0]),
    }


def _revocation(world: _World, author: Identity) -> dict[str, Any]:
    return {"type": "TRUST_REVOCATION", "from": author.did, "to": world.author().did}


def _key_event(world: _World, author: Identity) -> dict[str, Any]:
    event = world.chance.choice(["ADD", "ROTATE", "REVOKE", "NOOP"])
    content: dict[str, Any] = {"type": "KEY_EVENT", "event": event, "key_id": f"{author.did}#k"}
    if event == "REVOKE":
        return {**content, "revoked_at": world.now}
    key = author.did.removeprefix("did:strata:")
    content |= {"public_key_multibase": key, "valid_from": world.now, "valid_until": 0}
    return content | ({"replaces": f"{author.did}#key-1"} if event == "ROTATE" else {})


def _approval(world: _World, author: Identity) -> dict[str, Any]:
    return {"type": "RECOVERY_APPROVAL", "target_event": world.packet_id(), "approved_at": world.now}


def _document(world: _World, author: Identity) -> dict[str, Any]:
    key = {
        "id": f"{author.did}#key-1",
        "type": "Ed25519VerificationKey2020",
        "controller": author.did,
        "publicKeyMultibase": author.did.removeprefix("did:strata:"),
    }
    document = {"id": author.did, "verificationMethod": [key], "authentication": [key["id"]]}
    return {"type": "DID_DOCUMENT", "document": document}


def _manifest(world: _World, author: Identity) -> dict[str, Any]:
    key = {"key_id": "k", "public_key": "0x" + author.public_key.hex(), "valid_from": 0, "valid_until": 0}
    return {"type": "CLIENT_MANIFEST", "client_id": author.did, "name": "n", "public_keys": [key]}


def _attestation(world: _World, author: Identity) -> dict[str, Any]:
    target = world.packet_id()
    attestation = {
        "attestation_id": "a",
        "attestor_id": author.did,
        "subject": "s",
        "target_packet": target,
        "confidence": 0.5,
        "issued_at": world.now,
        "signature": "0x" + "5a" * 64,
    }
    return {"type": "ATTESTATION", "target_packet": target, "attestation": attestation}


def _correction(world: _World, author: Identity) -> dict[str, Any]:
    return {"type": "CORRECTION", "target_packet": world.packet_id(), "action": "retract"}


def _metric(world: _World, author: Identity) -> dict[str, Any]:
    return {
        "type": "CONSENSUS_METRIC",
        "source_id": author.did,
        "target_packet": world.packet_id(),
        "metrics": {"x": 0.5},
        "observed_at": world.now,
    }


def _config(world: _World, author: Identity) -> dict[str, Any]:
    return {
        "type": "CONFIG",
        "scope": "BOOTSTRAP_SNAPSHOT",
        "source_id": author.did,
        "issued_at": world.now,
        "expires_at": world.now + 5,
    }


def _descriptor(world: _World, author: Identity) -> dict[str, Any]:
    return {
        "type": "RELAY_DESCRIPTOR",
        "relay_id": author.did,
        "descriptor_version": 1,
        "ws_endpoint": "wss://relay.test/strata",
    }


TYPES: Final[Mapping[str, Callable[[_World, Identity], dict[str, Any]]]] = {
    "POST": _post,
    "TRUST_EDGE": _edge,
    "TRUST_REVOCATION": _revocation,
    "KEY_EVENT": _key_event,
    "RECOVERY_APPROVAL": _approval,
    "DID_DOCUMENT": _document,
    "CLIENT_MANIFEST": _manifest,
    "ATTESTATION": _attestation,
    "CORRECTION": _correction,
    "CONSENSUS_METRIC": _metric,
    "CONFIG": _config,
    "RELAY_DESCRIPTOR": _descriptor,
}
"""Types of packets that the relay reads, and one that it does not."""


def _header(world: _World) -> dict[str, Any]:
    header: dict[str, Any] = {
        "origin_type": world.chance.choice(["UNKNOWN", "SOFTWARE", "AI_MODEL", "CAMERA", "X"]),
        "genesis_media_hash": None,
        "edit_history": [],
    }
    if world.chance.random() < 0.5:
        header["client_attestation"] = {
            "client_id": world.author().did,
            "client_version": "1",
            "key_id": "k",
            "signed_at": world.now,
            "signature": "0x" + "5a" * 64,
        }
    return header


# Spoiling.

_NUMBERS: Final = [
    0,
    -0.0,
    1.5,
    1e-9,
    1e21,
    5e-324,
    1.7e308,
    2**53 - 1,
    2**53,
    -(2**53),
    2**63,
    2**64,
    10**30,
]
_GOOD_NUMBERS: Final = [number for number in _NUMBERS if type(number) is float or abs(number) < 2**53]
_STRINGS: Final = [
    "",
    "\x00",
    "\ud800",
    "\ufeff",
    "ﬀ",
    "x" * 300,
    "did:strata:z6Mk",
    "did:strata:" + "z" * 5000,
    "0x" + "AB" * 32,
    "$challenge",
    "asc",
]
_SCALARS: Final[list[_Value]] = [None, True, False, *_NUMBERS, *_STRINGS]
_NAMES: Final = [
    "type",
    "packet",
    "content",
    "timestamp",
    "expires_at",
    "nonce",
    "strength",
    "observed_at",
    "attestations",
    "relay_annotations",
    "media",
    "",
    "\x00",
    "é",
]


def _spoil(chance: random.Random, value: dict[str, Any]) -> None:
    """Change one member somewhere below, in place."""
    place: Any = value
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = chance.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.7:
            place = place[key]
            continue
        _spoil_at(chance, place, key)
        return
    if isinstance(place, dict):
        place[chance.choice(_NAMES)] = chance.choice(_SCALARS)
    else:
        place.append(chance.choice(_SCALARS))


def _spoil_at(chance: random.Random, place: Any, key: Any) -> None:
    match chance.randrange(8):
        case 0 | 1:
            place[key] = chance.choice(_SCALARS)
        case 2:
            del place[key]
        case 3:
            place[key] = [place[key]] * chance.choice([1, 2, 40])
        case 4:
            place[key] = {chance.choice(_NAMES): place[key]}
        case 5 if isinstance(place, dict):
            place[chance.choice(_NAMES)] = place[key]
        case 6:
            for _ in range(chance.choice([5, 30, 63, 70])):
                place[key] = [place[key]] if chance.random() < 0.5 else {"a": place[key]}
        case _:
            old = place[key]
            if isinstance(old, str):
                at = chance.randint(0, len(old))
                place[key] = old[:at] + chance.choice(_STRINGS) + old[at + chance.randint(0, 3) :]
            elif isinstance(old, int | float):
                place[key] = old + chance.choice([-1, 1, 0.5, 10**9, -(10**9)])
            else:
                place[key] = chance.choice(_SCALARS)


def _dumps(value: _Value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _respell(chance: random.Random, text: str) -> str:
    """The text as other JSON, or nearly JSON, with nearly the same meaning."""
    at = chance.randint(0, len(text))
    match chance.randrange(8):
        case 0:
            return text.replace(",", " ,\n\t").replace(":", " : ")
        case 1:
            return text.replace("e", "\\u0065")
        case 2:
            return text[:at]
        case 3:
            return text + chance.choice(["", " ", "x", "{}", "\x00"])
        case 4:
            return text.replace("{", '{"type":"PUBLISH",', chance.randint(1, 3))
        case 5:
            return text.replace("1", chance.choice(["1.0", "1e0", "01", "+1", "1" * 400, "NaN", "-"]), 1)
        case 6:
            return text.replace('"', chance.choice(["'", '\\"', ""]), 1)
        case _:
            return text[:at] + chance.choice(['"', "[", "}", ",", "\\", "\ud800", "\x01", "🦀"]) + text[at:]


def _scramble(chance: random.Random, data: bytes) -> bytes:
    """Changed bytes, UTF-8 or not."""
    at = chance.randrange(len(data) + 1)
    match chance.randrange(4):
        case 0:
            return data[:at] + chance.randbytes(chance.randint(1, 4)) + data[at:]
        case 1:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at + chance.randint(1, 20) :]
        case _:
            return data[:at] + data[:at]


def _bad_frames(chance: random.Random, pieces: list[Piece]) -> Piece:
    """A frame with a wrong header, a truncated one, or one in the wrong place."""
    piece = chance.choice(pieces)
    wire = bytearray(piece.on_the_wire(piece.data))
    match chance.randrange(6):
        case 0:
            wire[0] = chance.randrange(256)
        case 1:
            wire[1] = chance.randrange(256)
        case 2:
            wire = wire[: chance.randrange(len(wire))]
        case 3:
            return Piece(chance.randbytes(chance.randint(1, 60)), raw=True)
        case 4:  # a control frame in between, whole or too large
            body = chance.randbytes(chance.choice([0, 2, 125, 126]))
            length = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe\x00\x7e"
            return Piece(
                bytes([chance.choice([0x88, 0x89, 0x8A, 0x08])]) + length + bytes(4) + body, raw=True
            )
        case _:
            wire = wire[:-1] + wire
    return Piece(bytes(wire), raw=True)


def kinds_of(made: Input) -> Counter[str]:
    """The number of its pieces that name each type of message."""
    return Counter(
        name
        for piece in made.pieces
        for name in ("PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "AUTH", "RECONCILE")
        if f'"type":"{name}"'.encode() in piece.data
    )
