"""SDS message ids (C-098, A-109)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from Crypto.Hash import keccak

from strata.channels.sds.config import MAX_ID_BYTES

__all__ = ["check_id", "is_usable_id", "message_id"]


def message_id(sender_id: str, now_ns: int, content: bytes) -> str:
    """Hex Keccak-256 of sender, time of wrapping and content: each wrapping has an id of its own."""
    digest = keccak.new(digest_bits=256)
    digest.update(f"{sender_id}{now_ns}".encode() + content)
    return digest.hexdigest()


def is_usable_id(text: str) -> bool:
    """Whether an id is neither empty nor too long to keep (C-302)."""
    # No character takes more than four bytes.
    length = len(text)
    return 0 < length <= MAX_ID_BYTES // 4 or 0 < len(text.encode()) <= MAX_ID_BYTES


def check_id(name: str, text: str) -> str:
    """Return an id of one's own. Raises `ValueError` if it is empty or too long (C-002)."""
    if not is_usable_id(text):
        raise ValueError(f"{name} must have 1 to {MAX_ID_BYTES} bytes")
    return text
