"""JUMBF, the boxes that contain C2PA manifests (ISO/IEC 19566-5), as far as C2PA uses them.

superbox 'jumb' = description box 'jumd' (type id, toggles, label) + content boxes, superboxes among them
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.protocol.provenance.evidence import refuse_evidence

__all__ = ["MAX_BOXES", "MAX_BOX_DEPTH", "SuperBox", "parse"]

MAX_BOXES = 4096
"""The most boxes in one payload."""
MAX_BOX_DEPTH = 8

_HEADER_BYTES = 8
_LONG_HEADER_BYTES = 16
_TYPE_ID_BYTES = 16
_HAS_LABEL = 0x02


@dataclass(frozen=True, slots=True)
class SuperBox:
    """One superbox: its label, its children, and the bytes that its hashes cover."""

    type_id: bytes
    label: str
    body: bytes
    """The content, from the description box on, without the header of the superbox itself."""
    boxes: tuple[SuperBox, ...]
    contents: dict[str, bytes]
    """The first plain box of each type, such as `cbor`."""

    def child(self, label: str) -> SuperBox | None:
        """The first inner superbox with this label, or None."""
        return next((box for box in self.boxes if box.label == label), None)


def parse(data: bytes) -> SuperBox:
    """Read `data` as one superbox.

    Raises `InvalidPacket` (`invalid_attestation`) if it is not one, or exceeds `MAX_BOXES` or
    `MAX_BOX_DEPTH`.
    """
    boxes = list(_split(data))
    if len(boxes) != 1 or boxes[0][0] != b"jumb":
        _refuse()
    return _read(boxes[0][1], MAX_BOX_DEPTH, [MAX_BOXES])


def _read(body: bytes, depth: int, budget: list[int]) -> SuperBox:
    parts = _split(body)
    kind, description = next(parts, (b"", b""))
    if kind != b"jumd" or depth == 0:
        _refuse()
    children: list[SuperBox] = []
    contents: dict[str, bytes] = {}
    for kind, inner in parts:
        budget[0] -= 1
        if budget[0] < 0:
            _refuse()
        if kind == b"jumb":
            children.append(_read(inner, depth - 1, budget))
        else:
            contents.setdefault(kind.decode("latin-1"), inner)
    type_id, label = _describe(description)
    return SuperBox(type_id, label, body, tuple(children), contents)


def _split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The consecutive boxes in `data`, as (type, content)."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        header = _HEADER_BYTES
        if size == 1:  # a length of 64 bits follows
            size, header = int.from_bytes(data[at + 8 : at + 16], "big"), _LONG_HEADER_BYTES
        elif size == 0:  # up to the end of `data`
            size = len(data) - at
        if size < header or at + size > len(data):
            _refuse()
        yield kind, data[at + header : at + size]
        at += size


def _describe(description: bytes) -> tuple[bytes, str]:
    if len(description) <= _TYPE_ID_BYTES:
        _refuse()
    toggles = description[_TYPE_ID_BYTES]
    if not toggles & _HAS_LABEL:
        return description[:_TYPE_ID_BYTES], ""
    label, end, _ = description[_TYPE_ID_BYTES + 1 :].partition(b"\x00")
    if not end:
        _refuse()
    return description[:_TYPE_ID_BYTES], label.decode("utf-8", "replace")


def _refuse() -> None:
    refuse_evidence("the payload is not JUMBF", "malformed_evidence")
