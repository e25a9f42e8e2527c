"""The curve of Ed25519 in plain numbers (RFC 8032 §5.1), for signatures that no signer makes.

A signer produces points of prime order in their canonical encoding. An attacker who chooses the points can
add one of the eight points of small order to key or R, or write a coordinate with the field's order added.
"""

from __future__ import annotations

import hashlib

ORDER = 2**252 + 27742317777372353535851937790883648493
_FIELD = 2**255 - 19
_D = -121665 * pow(121666, -1, _FIELD) % _FIELD
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    k = _D * a[0] * b[0] * a[1] * b[1] % _FIELD
    x = (a[0] * b[1] + b[0] * a[1]) * pow(1 + k, -1, _FIELD)
    y = (a[1] * b[1] + a[0] * b[0]) * pow(1 - k, -1, _FIELD)
    return x % _FIELD, y % _FIELD


def times(number: int, point: Point) -> Point:
    result = (0, 1)
    for bit in f"{number:b}":
        result = add(result, result)
        if bit == "1":
            result = add(result, point)
    return result


def encodings(point: Point) -> list[bytes]:
    """The canonical encoding of a point, followed by all that some decoders accept for the same point."""
    x, y = point
    signs = {x & 1, 1} if x == 0 else {x & 1}
    spellings = [
        y + _FIELD * more | sign << 255
        for more in (0, 1)
        for sign in sorted(signs)
        if y + _FIELD * more < 1 << 255
    ]
    return [spelling.to_bytes(32, "little") for spelling in spellings]


def point_at(y: int, sign: int = 0) -> Point | None:
    """The point with this second coordinate; None if there is none."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _FIELD) % _FIELD
    x = pow(square, (_FIELD + 3) // 8, _FIELD)
    if x * x % _FIELD != square:
        x = x * pow(2, (_FIELD - 1) // 4, _FIELD) % _FIELD
    if x * x % _FIELD != square:
        return None
    return (_FIELD - x if x & 1 != sign and x else x), y


def _base() -> Point:
    point = point_at(4 * pow(5, -1, _FIELD) % _FIELD)
    assert point is not None
    return point


def _small() -> list[Point]:
    for y in range(2, 100):
        point = point_at(y)
        if point is not None and times(4, generator := times(ORDER, point)) != (0, 1):
            return [times(number, generator) for number in range(8)]
    raise AssertionError("no point of order eight")


BASE = _base()
SMALL = _small()
"""The points of small order; the first is the neutral one."""


def signed(secret: int, nonce: int, message: bytes, *, key: bytes, r: bytes) -> bytes:
    """The signature with `secret` and `nonce`, claiming any `key` and `r`."""
    digest = hashlib.sha512(r + key + message).digest()
    s = (nonce + int.from_bytes(digest, "little") * secret) % ORDER
    return r + s.to_bytes(32, "little")
