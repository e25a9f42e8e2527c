"""Packets signed and frames masked before any clock starts."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import msgspec
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet, build
from strata.protocol.wire import Publish, encode

from benches.measures import Progress
from benches.processes import fork_context

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform without the compiled part
    from websockets.utils import apply_mask

__all__ = [
    "AUTHORS",
    "CONTENT_TYPE",
    "Load",
    "Signer",
    "client_frame",
    "make_load",
    "publish_frame",
    "sign",
    "text_of",
]

Signer = Callable[[int, int], Sequence[Packet]]
"""Signs a number of packets, from a first number on. It is sent to other processes."""

AUTHORS = 64
CONTENT_TYPE = "POST"
_TEXT_CHARACTERS = 220  # signs 366 bytes and makes a packet of 592: the size that design §6 assumes
_CHUNK = 2_500


@dataclass(frozen=True, slots=True)
class Load:
    """Packets in the order in which they will be sent: their ids, and each as a masked PUBLISH frame."""

    ids: list[str]
    frames: list[bytes]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, first: int, count: int) -> Load:
        """A part of the load."""
        return Load(self.ids[first : first + count], self.frames[first : first + count])


def client_frame(payload: bytes) -> bytes:
    """A complete text frame as a client sends it."""
    mask = os.urandom(4)
    length = len(payload)
    if length < 126:
        header = bytes((0x81, 0x80 | length))
    elif length < 65_536:
        header = b"\x81\xfe" + length.to_bytes(2, "big")
    else:
        header = b"\x81\xff" + length.to_bytes(8, "big")
    return header + mask + apply_mask(payload, mask)


def text_of(number: int, run: str) -> str:
    """The text of a packet of the usual size, different for every number and run."""
    return f"{number:08d} {run} ".ljust(_TEXT_CHARACTERS, "x")


def sign(first: int, count: int) -> list[Packet]:
    """Packets of equal size by a few authors, no two of them alike even across runs."""
    identities = [Identity(number.to_bytes(32, "big")) for number in range(1, AUTHORS + 1)]
    now, run = int(time.time()), os.urandom(8).hex()
    return [
        build(
            identities[number % AUTHORS],
            {"type": CONTENT_TYPE, "text": text_of(number, run)},
            timestamp=now,
        )
        for number in range(first, first + count)
    ]


def publish_frame(packet: bytes) -> bytes:
    """The frame that publishes a packet, given as JSON text."""
    return client_frame(encode(Publish(packet=msgspec.Raw(packet))))


def make_load(count: int, progress: Progress, signer: Signer = sign) -> Load:
    """Sign `count` packets, on every core, and make their frames."""
    starts = range(0, count, _CHUNK)
    ids: list[str] = []
    frames: list[bytes] = []
    context = fork_context()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(starts)), mp_context=context) as pool:
        sizes = [min(_CHUNK, count - start) for start in starts]
        chunks = pool.map(functools.partial(_signed_frames, signer), starts, sizes)
        for chunk_ids, chunk_frames in chunks:
            ids += chunk_ids
            frames += chunk_frames
            progress(f"signed {len(ids):,} of {count:,} packets")
    return Load(ids, frames)


def _signed_frames(signer: Signer, first: int, count: int) -> tuple[Sequence[str], Sequence[bytes]]:
    packets = signer(first, count)
    return [packet.packet_id for packet in packets], [publish_frame(packet.canonical) for packet in packets]
