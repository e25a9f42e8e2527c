"""Packets for the logs and lakes of the benchmarks of the pipeline, as fast as they can be made.

A day of 10⁸ packets is signed in minutes and not in hours, since nobody who checks a signature can tell how
its author chose the nonce: here every signature has the same one. So ids, bytes and signatures are right, and
checking them takes as long as for any packet. **Two signatures with one nonce give the key away**: these keys
are made from numbers, and are good for nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from nacl.bindings import crypto_scalarmult_ed25519_base_noclamp
from strata.protocol import canonical
from strata.protocol.ids import Identity

__all__ = ["Author", "Made", "Row", "author", "know_authors", "made_rows", "unsigned"]

_TYPES = ("POST", "REACTION", "/bench/1/room/proto", "NOTE")
_MOST_KNOWN = 100_000
"""Of an author and its keys: so many stay in memory."""
_WORDS = 2_048
_LEAST_WORDS, _MOST_WORDS = 8, 35
_COPIED, _COPIES = 40, 20
"""Of varied texts one in forty repeats one of twenty."""

_ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the group in which Ed25519 signs (RFC 8032, 5.1)."""
_NONCE = int.from_bytes(hashlib.sha512(b"the nonce of all benchmarks").digest(), "little") % _ORDER
_POINT = crypto_scalarmult_ed25519_base_noclamp(_NONCE.to_bytes(32, "little"))

Row = tuple[int, int, bytes, bytes, bytes, bytes]
"""A packet as the log has it: received_at, timestamp, packet_id, author_id, content_type, body."""


@dataclass(frozen=True, slots=True)
class Made:
    """Which packets a log gets. Their ids are right."""

    rows: int
    signed: bool
    """Else the signatures are random digits: who does not look at signatures cannot tell."""
    at: int
    """Unix seconds at which the first is received."""
    seconds: int = 0
    """The last one is received so much later, on the same day."""
    first: int = 0
    """The number of the first packet; a packet of another number is another packet."""
    authors: int = 200
    varied: bool = False
    """A few authors write most, and texts differ; else authors take turns and texts are nearly the same."""


@dataclass(frozen=True, slots=True)
class Author:
    """Who signs with the nonce of all benchmarks."""

    did: str
    commitment: bytes
    """What each of its signatures commits to: the point of the nonce, and the public key."""
    scalar: int

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes that holds (RFC 8032, 5.1.6, but for the choice of the nonce)."""
        challenge = int.from_bytes(hashlib.sha512(self.commitment + message).digest(), "little")
        return _POINT + ((_NONCE + challenge * self.scalar) % _ORDER).to_bytes(32, "little")


@functools.lru_cache(maxsize=_MOST_KNOWN)
def author(number: int) -> Author:
    """One of any number of authors."""
    identity = Identity(blake3(b"bench author %d" % number).digest())
    clamped = bytearray(hashlib.sha512(identity.seed).digest()[:32])
    clamped[0] &= 248
    clamped[31] = clamped[31] & 127 | 64
    return Author(identity.did, _POINT + identity.public_key, int.from_bytes(clamped, "little"))


def know_authors(authors: int) -> None:
    """Make the keys of so many authors, for this process and for those that it forks."""
    for number in range(min(authors, _MOST_KNOWN)):
        author(number)


def made_rows(numbers: range, *, made: Made) -> list[Row]:
    """The packets of these numbers of a log."""
    return [_row(made.first + n, made.at + n * made.seconds // made.rows, made) for n in numbers]


def _row(number: int, at: int, made: Made) -> Row:
    if made.varied:
        share, text = _varied(number)
        who = author(int(made.authors * share**3))
    else:
        who, text = author(number % made.authors), f"packet {number} {'lorem ipsum ' * 12}"
    kind = _TYPES[number % len(_TYPES)]
    # The canonical form, written down: no member of it needs an escape.
    first = f'{{"author_id":"{who.did}","content":{{"text":"{text}","type":"{kind}"}},"nonce":"{number}",'
    last = f'"timestamp":{at},"version":1}}'
    signed = f"{first}{last}".encode()
    digest = blake3(signed).digest()
    signature = who.sign(signed) if made.signed else _noise(digest)
    body = f'{first}"packet_id":"0x{digest.hex()}","signature":"0x{signature.hex()}",{last}'
    return at, at, digest, who.did.encode(), kind.encode(), body.encode()


def unsigned(did: bytes, content: Mapping[str, str], at: int, number: int) -> Row:
    """A packet whose id is right and whose signature is random digits."""
    members: dict[str, object] = {
        "author_id": did.decode(),
        "content": content,
        "nonce": str(number),
        "timestamp": at,
        "version": 1,
    }
    digest = blake3(canonical.encode(members)).digest()
    members |= {"packet_id": f"0x{digest.hex()}", "signature": f"0x{_noise(digest).hex()}"}
    return at, at, digest, did, content["type"].encode(), canonical.encode(members)


def _noise(digest: bytes) -> bytes:
    return blake3(digest).digest(length=64)


def _varied(number: int) -> tuple[float, str]:
    """Where the author of a packet stands among all, from 0 to 1, and its text."""
    drawn = _drawn(b"packet %d" % number)
    share = (drawn[0] << 16 | drawn[1]) / 2**32
    if drawn[2] % _COPIED == 0:
        drawn = _drawn(b"copied %d" % (drawn[3] % _COPIES))
    words = _LEAST_WORDS + drawn[3] % (_MOST_WORDS - _LEAST_WORDS + 1)
    return share, " ".join(map(_vocabulary().__getitem__, drawn[4 : 4 + words]))


def _drawn(name: bytes) -> Sequence[int]:
    """Numbers below 2¹⁶, always the same for a name: as many as a packet takes at most."""
    return memoryview(blake3(name).digest(length=2 * (4 + _MOST_WORDS))).cast("H")


@functools.cache
def _vocabulary() -> list[str]:
    """A word for each number below 2¹⁶."""
    chosen = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chosen.choices(letters, k=chosen.randrange(2, 10))) for _ in range(_WORDS)]
    return words * (2**16 // _WORDS)
