"""The encryption hook of a channel, and an implementation of it with group keys (channel.md §12).

Without a hook nothing that a channel sends is confidential. Relays, and anyone else who sees the packets, can
read the payloads, who sends in which channel, the id and causal history of each message, and the index, the
count and the hash of the whole in each segment (C-245). With a hook they see the content topic, the packet's
author, times and sizes.

A hook is any object with `encrypt` and `decrypt`, bytes to bytes, as plain or coroutine functions (C-237). It
is given each whole encoded SDS message, including sync, repair and in-channel ephemeral messages. All
participants must use the same hook: a participant that cannot decrypt receives nothing (C-241, C-246). The
channel manages no keys and requires no particular scheme (C-242).

`GroupKeyEncryption` is such a hook: XChaCha20-Poly1305 under keys that the participants share. It hides the
content from anyone without a key. It does not distinguish one key holder from another; for that, see the
channel's `sender_binding`. It cannot revoke what a former key holder knows; for that, distribute a new key.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NoReturn, Protocol, runtime_checkable

import blake3
import nacl.bindings
import nacl.exceptions

from strata.channels.awaiting import answer_of
from strata.protocol import secret_files
from strata.protocol.errors import StrataError

__all__ = [
    "KEY_BYTES",
    "DecryptionFailed",
    "Encryption",
    "EncryptionFailed",
    "EncryptionHook",
    "GroupKey",
    "GroupKeyEncryption",
    "GroupKeyError",
]

KEY_BYTES = 32

_FORMAT = b"\x01"
_KEY_ID_BYTES = 8
_NONCE_BYTES = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_NPUBBYTES
_TAG_BYTES = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_ABYTES
_HEADER_BYTES = len(_FORMAT) + _KEY_ID_BYTES + _NONCE_BYTES
_KEY_ID_CONTEXT = "strata group key id 2026"
_ASSOCIATED_DATA = b"strata group-key 1\x00"
_FILE_KIND = "strata-group-key"


class EncryptionFailed(StrataError):
    """The hook could not encrypt, so this chunk fails permanently (C-244). The cause is the hook's error."""

    def __str__(self) -> str:
        return "the encryption hook failed"


class DecryptionFailed(StrataError):
    """A received message cannot be decrypted: it is dropped and counted (C-244)."""

    def __str__(self) -> str:
        return "the message cannot be decrypted"


class GroupKeyError(StrataError, ValueError):
    """A group key, key file or set of keys is invalid. The text never quotes the key."""


@runtime_checkable
class Encryption(Protocol):
    """The `encryption` of a channel. An optional attribute `overhead` says how many bytes it adds."""

    def encrypt(self, content: bytes, /) -> bytes | Awaitable[bytes]:
        """The bytes to send for this content. If it raises, the chunk fails."""
        ...

    def decrypt(self, payload: bytes, /) -> bytes | Awaitable[bytes]:
        """The content of these bytes, which may come from anyone. If it raises, they are dropped."""
        ...


class EncryptionHook:
    """A user's hook behind one interface: asynchronous, with two known errors."""

    def __init__(self, hook: Encryption) -> None:
        """Raises `TypeError` if a function is missing, or if `overhead` is not a size (C-238)."""
        self._encrypt = _function(hook, "encrypt")
        self._decrypt = _function(hook, "decrypt")
        overhead = getattr(hook, "overhead", 0)
        if type(overhead) is not int or overhead < 0:
            raise TypeError("the overhead of an encryption hook is a number of bytes")
        self.overhead = overhead
        """The bytes that the hook says it adds; the channel's size check includes them (C-243)."""

    async def encrypt(self, content: bytes) -> bytes:
        """Run the hook. Raises `EncryptionFailed` if the hook raises or does not return bytes."""
        try:
            return await _run(self._encrypt, content)
        except Exception as error:
            raise EncryptionFailed from error

    async def decrypt(self, payload: bytes) -> bytes:
        """Run the hook. Raises `DecryptionFailed` if the hook raises or does not return bytes."""
        try:
            return await _run(self._decrypt, payload)
        except Exception as error:
            raise DecryptionFailed from error


_Function = Callable[[bytes], bytes | Awaitable[bytes]]


def _function(hook: object, name: str) -> _Function:
    function = getattr(hook, name, None)
    if not callable(function):
        raise TypeError(f"an encryption hook needs both encrypt and decrypt; {name} is missing")
    return function  # type: ignore[no-any-return]


async def _run(function: _Function, data: bytes) -> bytes:
    result = await answer_of(function, data)
    if not isinstance(result, bytes):
        raise TypeError(f"the hook returned {type(result).__name__} instead of bytes")
    return result


class GroupKey:
    """A 32-byte key that the participants of a channel share.

    Only `save` and `secret` disclose it. `repr` and errors name it by `key_id`, a one-way derivative.
    """

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        """Raises `GroupKeyError` if `secret` is not 32 bytes."""
        if len(secret) != KEY_BYTES:
            raise GroupKeyError(f"a group key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = bytes(secret)
        self.key_id = blake3.blake3(self._secret, derive_key_context=_KEY_ID_CONTEXT).digest(_KEY_ID_BYTES)
        """Eight bytes that name the key in every message."""

    @classmethod
    def generate(cls) -> GroupKey:
        """A new key from the system's random source."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def secret(self) -> bytes:
        """The 32 bytes. Anyone who has them can read the channel and write to it."""
        return self._secret

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroupKey):
            return NotImplemented
        return secrets.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.key_id)

    def __repr__(self) -> str:
        return f"GroupKey({self.key_id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group key is saved with save(), not pickled: it would travel unseen")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read.

        Raises `FileExistsError` rather than replace a key, and any other `OSError` of the file system.
        """
        members = {"kind": _FILE_KIND, "key_id": f"0x{self.key_id.hex()}", "key": f"0x{self._secret.hex()}"}
        secret_files.write_secret(path, members)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GroupKey:
        """Read a file that `save` wrote.

        Raises `GroupKeyError` if other users can read the file or if it is not a key file, and any `OSError`
        of the file system. No error quotes the file.
        """
        try:
            body = secret_files.read_secret(path)
        except secret_files.SharedSecret as error:
            raise GroupKeyError(str(error)) from None
        key = _key_from_file(body)
        if key is None:
            raise GroupKeyError(f"{Path(path)} is not a group key file")
        return key


def _key_from_file(body: bytes) -> GroupKey | None:
    try:
        members = json.loads(body)
        if members["kind"] != _FILE_KIND or not members["key"].startswith("0x"):
            return None
        key = GroupKey(bytes.fromhex(members["key"][2:]))
        # The file also has the id, so that a damaged key is detected and not taken for another key.
        return key if members["key_id"] == f"0x{key.key_id.hex()}" else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


class GroupKeyEncryption:
    """XChaCha20-Poly1305 with shared keys, as the hook of one channel.

    A message is: format (1 byte, 01) ‖ key id (8) ‖ nonce (24, random) ‖ ciphertext and tag (16 more than the
    content). The header and the channel id are authenticated too, so a message that is moved to another
    channel with the same key does not decrypt there.

    The first key encrypts; all keys decrypt, and the key id in the message selects one. To rotate a key,
    first give the new key to everybody as a further key, then make it the first key. `use` changes the keys
    while the channel is open.
    """

    overhead = _HEADER_BYTES + _TAG_BYTES

    def __init__(
        self,
        channel_id: str,
        keys: GroupKey | Iterable[GroupKey],
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """The first key encrypts. Raises `GroupKeyError` for no key, or two different keys with one id."""
        self.use(keys)
        self._channel = _ASSOCIATED_DATA + channel_id.encode() + b"\x00"
        self._random_bytes = random_bytes

    def use(self, keys: GroupKey | Iterable[GroupKey]) -> None:
        """Replace the keys. A channel rereads messages that the new keys decrypt and the former did not.

        Raises what the constructor raises; the former keys then stay in use.
        """
        given = (keys,) if isinstance(keys, GroupKey) else tuple(keys)
        if not given:
            raise GroupKeyError("a channel needs a group key at least")
        by_id = {key.key_id: key for key in given}
        if any(by_id[key.key_id] != key for key in given):
            raise GroupKeyError("two different group keys have one id")
        self._keys, self._current = by_id, given[0]

    def encrypt(self, content: bytes) -> bytes:
        """The content under the current key, `overhead` bytes longer. Equal contents encrypt differently."""
        # 24 random bytes never repeat in practice, so participants need not agree on a counter.
        nonce = self._random_bytes(_NONCE_BYTES)
        header = _FORMAT + self._current.key_id + nonce
        return header + nacl.bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(
            content, self._channel + header, nonce, self._current.secret
        )

    def decrypt(self, payload: bytes) -> bytes:
        """The content. Raises `DecryptionFailed` unless a key holder made these bytes for this channel."""
        header = payload[:_HEADER_BYTES]
        key = self._keys.get(header[len(_FORMAT) : len(_FORMAT) + _KEY_ID_BYTES])
        # The binding passes a pointer and a length to C: bytes too short for a tag must not reach it.
        if key is None or not header.startswith(_FORMAT) or len(payload) < self.overhead:
            raise DecryptionFailed
        try:
            return nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(
                payload[_HEADER_BYTES:], self._channel + header, header[-_NONCE_BYTES:], key.secret
            )
        except nacl.exceptions.CryptoError:
            raise DecryptionFailed from None

    def __repr__(self) -> str:
        return f"GroupKeyEncryption({', '.join(key.hex() for key in self._keys)})"
