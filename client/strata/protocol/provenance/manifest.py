"""CLIENT_MANIFEST: the identity of client software, and the keys it attests with (RFC-0002 §11.3)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from strata.protocol import fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import PUBLIC_KEY_BYTES
from strata.protocol.packets import Packet

__all__ = [
    "CLIENT_MANIFEST",
    "MAX_CLIENT_KEYS",
    "ClientKey",
    "check_manifest",
    "client_keys",
    "manifest_content",
    "newest",
]

CLIENT_MANIFEST = "CLIENT_MANIFEST"

MAX_CLIENT_KEYS = 16
"""The most keys of one manifest that are tried on a signature, the latest first: otherwise every packet that
names a manifest with thousands of keys would take a second of a relay's time."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One entry of `public_keys`. Times are Unix seconds; `valid_until` 0 means no end."""

    key_id: str
    public_key: bytes
    valid_from: int
    valid_until: int

    def is_active(self, at: float, clock_skew_seconds: int) -> bool:
        """Whether the key's window, widened by the skew, covers `at` (R-232)."""
        return self.valid_from - clock_skew_seconds <= at and (
            self.valid_until == 0 or at <= self.valid_until + clock_skew_seconds
        )


def check_manifest(packet: Packet) -> None:
    """Refuse a CLIENT_MANIFEST that lacks a member required by R-234 or is for another DID (R-235).

    Raises `InvalidPacket` (`invalid_schema`).
    """
    content = packet.content
    if content.get("client_id") != packet.author_id:
        _refuse("client_id is not the author", "author_mismatch")
    if type(content.get("name")) is not str:
        _refuse("name is not a string")
    entries = content.get("public_keys")
    if type(entries) is not list or not entries:
        _refuse("public_keys is not an array with an entry")
    if not all(_read_key(entry) for entry in entries):
        _refuse("an entry of public_keys lacks a member or has one of the wrong type")
    for name, kind in _OPTIONAL.items():
        if content.get(name) is not None and type(content[name]) is not kind:
            _refuse(f"{name} has the wrong type")


_OPTIONAL: dict[str, type] = {"description": str, "homepage": str}
"""The optional members whose type the RFCs define; others, such as platforms, vary in form."""


def client_keys(manifest: Packet, at: float, clock_skew_seconds: int) -> Iterator[bytes]:
    """The keys with which this client may have signed at `at`, the latest `valid_from` first (R-232)."""
    entries = cast("list[object]", manifest.content.get("public_keys") or [])
    keys = (_read_key(entry) for entry in entries)
    active = [key for key in keys if key is not None and key.is_active(at, clock_skew_seconds)]
    active.sort(key=lambda key: key.valid_from, reverse=True)
    return (key.public_key for key in active[:MAX_CLIENT_KEYS])


def newest(manifests: Iterable[tuple[Packet, int]]) -> Packet | None:
    """The packet that counts among pairs `(packet, received_at)`: the latest, in a tie the one with the
    smallest id (R-236, A-080)."""
    return min(manifests, key=lambda entry: (-entry[1], entry[0].packet_id), default=(None, 0))[0]


def manifest_content(
    client_id: str,
    name: str,
    keys: Sequence[ClientKey],
    *,
    extra: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The content of a CLIENT_MANIFEST, which the identity `client_id` itself must publish (R-234).

    `extra` adds optional members such as `homepage`, `bundle_ids` or `attestation_support`.
    """
    return {
        **(extra or {}),
        "type": CLIENT_MANIFEST,
        "client_id": client_id,
        "name": name,
        "public_keys": [
            {
                "key_id": key.key_id,
                "public_key": f"0x{key.public_key.hex()}",
                "valid_from": key.valid_from,
                "valid_until": key.valid_until,
            }
            for key in keys
        ],
    }


def _read_key(entry: object) -> ClientKey | None:
    if type(entry) is not dict:
        return None
    key_id = entry.get("key_id")
    public_key = fields.hex_bytes(entry.get("public_key"), PUBLIC_KEY_BYTES)
    valid_from = fields.integer(entry.get("valid_from"))
    valid_until = fields.integer(entry.get("valid_until"))
    if type(key_id) is not str or public_key is None or valid_from is None or valid_until is None:
        return None
    return ClientKey(key_id, public_key, valid_from, valid_until)


def _refuse(reason: str, detail: str | None = None) -> NoReturn:
    raise InvalidPacket(ErrorCode.INVALID_SCHEMA, f"{CLIENT_MANIFEST}: {reason}", detail=detail)
