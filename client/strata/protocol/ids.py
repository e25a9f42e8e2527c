"""Identities: `did:strata` names, the Ed25519 keys behind them, signing and verifying (RFC-0001 §3–§4).

A self-certifying DID contains its own public key: `did:strata:z` + base58btc(`ed 01` ‖ 32-byte key) (R-045).
The form without the `ed 01` is read but never written (R-046). Every other DID is a name whose key must come
from elsewhere (R-047, R-059).

The same library signs and verifies everywhere, because libraries differ on keys and signatures at the edge
of the curve; its verdicts are pinned by tests/strata/protocol/vectors.json (R-025).
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import nacl.bindings
import nacl.exceptions

from strata.protocol import secret_files
from strata.protocol.errors import IdentityError

__all__ = [
    "MAX_DID_CHARACTERS",
    "PUBLIC_KEY_BYTES",
    "SEED_BYTES",
    "SIGNATURE_BYTES",
    "Identity",
    "Signer",
    "base58_decode",
    "base58_encode",
    "did_from_public_key",
    "is_did",
    "public_key_from_did",
    "public_key_from_method",
    "verify",
]

PUBLIC_KEY_BYTES = 32
SEED_BYTES = 32
SIGNATURE_BYTES = 64

MAX_DID_CHARACTERS = 1024
"""The longest DID accepted. DID syntax sets no bound, but an index on authors needs one."""

_CACHED_DIDS = 16_384
"""How many authors are cached; one that is not costs a few microseconds more."""

_ED25519_MULTICODEC = b"\xed\x01"
_STRATA_BASE58 = "did:strata:z"
_LONGEST_SELF_CERTIFYING = len(_STRATA_BASE58) + 47  # 34 bytes take at most 47 base58 digits

# W3C DID Core §3.1: a method name, then an id of unreserved or percent-encoded characters not ending in ':'.
_KEY_HEX = re.compile(r"0x[0-9A-Fa-f]{64}")
_DID = re.compile(r"did:[a-z0-9]+:(?:[A-Za-z0-9._:-]|%[0-9A-Fa-f]{2})*(?<!:)")

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {character: digit for digit, character in enumerate(_ALPHABET)}


class Signer(Protocol):
    """An object that can sign for a DID: a key in memory, in an agent or in hardware (R-089)."""

    @property
    def did(self) -> str:
        """The DID that the signatures are made for."""
        ...

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `message`."""
        ...


class Identity:
    """An Ed25519 key pair and the DID that it signs for: the key's own self-certifying DID, or another.

    Keys are made here and never leave (R-090): `repr` shows only the DID, and only `save` and `seed` reveal
    the seed.
    """

    __slots__ = ("_did", "_public_key", "_secret_key")

    def __init__(self, seed: bytes, did: str | None = None) -> None:
        """Raises `IdentityError` if `seed` is not 32 bytes or `did` is not a DID."""
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._public_key, self._secret_key = nacl.bindings.crypto_sign_seed_keypair(bytes(seed))
        if did is not None and not is_did(did):
            raise IdentityError("the text is not a DID")
        self._did = did or did_from_public_key(self._public_key)

    @classmethod
    def generate(cls) -> Identity:
        """Make a new identity from the system's random source."""
        return cls(secrets.token_bytes(SEED_BYTES))

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity with a 32-byte seed. Raises `IdentityError` for another length."""
        return cls(seed)

    def speaking_for(self, did: str) -> Identity:
        """The same key, signing for another DID, of which it must be one of the keys.

        It may be a key that the DID was rotated to, or a recovery key. Raises `IdentityError` if `did` is not
        a DID.
        """
        return Identity(self.seed, did)

    @property
    def did(self) -> str:
        """The DID that signatures are made for; by default the self-certifying DID of this key."""
        return self._did

    @property
    def public_key(self) -> bytes:
        """The 32-byte public key."""
        return self._public_key

    @property
    def seed(self) -> bytes:
        """The 32-byte seed. Anyone who has it can sign as this identity."""
        return self._secret_key[:SEED_BYTES]

    @property
    def custody(self) -> Literal["hardware", "wrapped", "software", "unknown"]:
        """Where the key is kept (R-091): an `Identity` holds it in the memory of the process."""
        return "software"

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message` itself, without a prefix or a prehash (R-023)."""
        return nacl.bindings.crypto_sign(message, self._secret_key)[:SIGNATURE_BYTES]

    def __repr__(self) -> str:
        return f"Identity({self._did})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an identity is saved with save(), not pickled: its seed would travel unseen")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read.

        Raises `FileExistsError` rather than replace a key, and `OSError` if the file system does.
        """
        members = {"did": self._did, "seed": f"0x{self.seed.hex()}"}
        key = did_from_public_key(self._public_key)
        if key != self._did:
            members["key"] = key
        secret_files.write_secret(path, members)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read a file that `save` wrote.

        Raises `IdentityError` if other users can read the file or it is not a key file, and `OSError` if the
        file system does. No error quotes the file.
        """
        try:
            body = secret_files.read_secret(path)
        except secret_files.SharedSecret as error:
            raise IdentityError(str(error)) from None
        identity = _identity_from_file(body)
        if identity is None:
            raise IdentityError(f"{Path(path)} is not a key file")
        return identity


def _identity_from_file(body: bytes) -> Identity | None:
    try:
        members = json.loads(body)
        did, seed = members["did"], members["seed"]
        if not seed.startswith("0x"):
            return None
        identity = Identity(bytes.fromhex(seed[2:]))
        # The file names the key besides its seed, so that a damaged seed is noticed and not taken for another
        # identity. The name is the DID itself, or `key` if the key signs for another DID.
        if identity.did != members.get("key", did):
            return None
        return identity.speaking_for(did)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def did_from_public_key(public_key: bytes) -> str:
    """The self-certifying DID of a 32-byte Ed25519 key (R-044, R-045).

    Raises `IdentityError` for another length.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise IdentityError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return _STRATA_BASE58 + base58_encode(_ED25519_MULTICODEC + public_key)


@functools.lru_cache(maxsize=_CACHED_DIDS)
def public_key_from_did(did: str) -> bytes | None:
    """The key that a self-certifying DID contains (R-045, R-046).

    None for any other DID: one of another method, a name, or one with an unknown kind of key (R-047, R-059).
    Raises `IdentityError` if `did` is not a DID.
    """
    if not is_did(did):
        raise IdentityError("the text is not a DID")
    if not did.startswith(_STRATA_BASE58) or len(did) > _LONGEST_SELF_CERTIFYING:
        return None
    try:
        key = base58_decode(did[len(_STRATA_BASE58) :])
    except IdentityError:
        return None
    if len(key) == PUBLIC_KEY_BYTES:
        return key
    if len(key) == len(_ED25519_MULTICODEC) + PUBLIC_KEY_BYTES and key.startswith(_ED25519_MULTICODEC):
        return key[len(_ED25519_MULTICODEC) :]
    return None


def public_key_from_method(public_key_hex: str | None, public_key_multibase: str | None) -> bytes:
    """The key of a verification method, from either of its two spellings, which must agree (R-026).

    Raises `IdentityError` if neither is given, one is malformed, or they differ.
    """
    keys = set()
    if public_key_hex is not None:
        if _KEY_HEX.fullmatch(public_key_hex) is None:
            raise IdentityError("public_key_hex is not 0x and 64 hex digits")
        keys.add(bytes.fromhex(public_key_hex[2:]))
    if public_key_multibase is not None:
        key = public_key_from_did(f"did:strata:{public_key_multibase}")
        if key is None or did_from_public_key(key) != f"did:strata:{public_key_multibase}":
            raise IdentityError("public_key_multibase is not an Ed25519 key in base58btc")
        keys.add(key)
    if len(keys) != 1:
        raise IdentityError("the two spellings of the key differ" if keys else "the method has no key")
    return keys.pop()


def is_did(text: str) -> bool:
    """Whether `text` has the form of a DID of any method."""
    # The length is checked before the cache, so that the cache holds no long texts of strangers.
    return len(text) <= MAX_DID_CHARACTERS and _has_form(text)


@functools.lru_cache(maxsize=_CACHED_DIDS)
def _has_form(text: str) -> bool:
    return _DID.fullmatch(text) is not None


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is the Ed25519 signature of `message` under `public_key` (RFC 8032, R-025).

    The check is strict: a scalar S beyond the group order, a key or R of small order, a key that is not in
    its canonical encoding, and wrong lengths all fail. Releases the interpreter lock while it computes.
    """
    # The binding passes a pointer and no length to C: these checks keep C inside the buffers.
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        nacl.bindings.crypto_sign_open(signature + message, public_key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


def base58_encode(data: bytes) -> str:
    """Base58 in Bitcoin's alphabet, without a multibase prefix; each leading zero byte is a leading `1`."""
    number = int.from_bytes(data, "big")
    characters = []
    while number:
        number, digit = divmod(number, 58)
        characters.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\x00"))
    return "1" * zeros + "".join(reversed(characters))


def base58_decode(text: str) -> bytes:
    """The bytes that `base58_encode` encoded. Raises `IdentityError` for a character outside the alphabet.

    The time is quadratic in the length: callers must bound the text.
    """
    number = 0
    for character in text:
        digit = _DIGITS.get(character)
        if digit is None:
            raise IdentityError("the text is not base58")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\x00" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
