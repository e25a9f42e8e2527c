"""Users' hooks behind one interface, and the group key hook that is included."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import stat
from pathlib import Path

import nacl.bindings
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels import encryption
from strata.channels.encryption import (
    DecryptionFailed,
    Encryption,
    EncryptionFailed,
    EncryptionHook,
    GroupKey,
    GroupKeyEncryption,
    GroupKeyError,
)

KEY = GroupKey(bytes(range(32)))
OTHER = GroupKey(bytes(range(1, 33)))


class Reverse:
    overhead = 3

    def encrypt(self, content: bytes) -> bytes:
        return b"rev" + content[::-1]

    def decrypt(self, payload: bytes) -> bytes:
        if not payload.startswith(b"rev"):
            raise ValueError("not mine")
        return payload[:2:-1]


class ReverseLater:
    async def encrypt(self, content: bytes) -> bytes:
        return Reverse().encrypt(content)

    async def decrypt(self, payload: bytes) -> bytes:
        return Reverse().decrypt(payload)


@pytest.mark.req("C-237")
@pytest.mark.parametrize("hook", [Reverse(), ReverseLater(), GroupKeyEncryption("room", KEY)])
async def test_plain_and_asynchronous_hooks_round_trip(hook: Encryption) -> None:
    assert isinstance(hook, Encryption)
    face = EncryptionHook(hook)
    encrypted = await face.encrypt(b"hello")
    assert b"hello" not in encrypted
    assert await face.decrypt(encrypted) == b"hello"


@pytest.mark.req("C-238")
@pytest.mark.parametrize("missing", ["encrypt", "decrypt"])
def test_a_hook_has_both_functions(missing: str) -> None:
    class Half:
        pass

    setattr(Half, "decrypt" if missing == "encrypt" else "encrypt", lambda _self, data: data)
    with pytest.raises(TypeError, match=missing):
        EncryptionHook(Half())  # type: ignore[arg-type]


@pytest.mark.req("C-243")
def test_the_overhead_is_declared_or_zero() -> None:
    assert EncryptionHook(Reverse()).overhead == 3
    assert EncryptionHook(ReverseLater()).overhead == 0
    assert EncryptionHook(GroupKeyEncryption("room", KEY)).overhead == 49
    for overhead in (-1, 2.5, "10", True):
        hook = Reverse()
        hook.overhead = overhead  # type: ignore[assignment]
        with pytest.raises(TypeError):
            EncryptionHook(hook)


@pytest.mark.req("C-244")
async def test_whatever_a_hook_does_wrong_is_one_error_each_way() -> None:
    class Broken:
        def encrypt(self, content: bytes) -> bytes:
            raise OSError("no hardware")

        async def decrypt(self, payload: bytes) -> bytes:
            return "text"  # type: ignore[return-value]

    hook = EncryptionHook(Broken())
    with pytest.raises(EncryptionFailed) as failed:
        await hook.encrypt(b"x")
    assert isinstance(failed.value.__cause__, OSError)
    with pytest.raises(DecryptionFailed) as dropped:
        await hook.decrypt(b"x")
    assert isinstance(dropped.value.__cause__, TypeError)
    assert str(failed.value) and str(dropped.value)


async def test_cancelling_is_no_failure_of_the_hook() -> None:
    begun = asyncio.Event()

    class Slow(Reverse):
        async def encrypt(self, content: bytes) -> bytes:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()
            return content

    task = asyncio.ensure_future(EncryptionHook(Slow()).encrypt(b"x"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.req("C-247")
def test_the_layout_of_a_group_key_message() -> None:
    hook = GroupKeyEncryption("room", KEY, random_bytes=lambda count: bytes(range(count)))
    message = hook.encrypt(b"hello")
    assert len(message) == len(b"hello") + hook.overhead
    header = b"\x01" + KEY.key_id + bytes(range(24))
    assert message.startswith(header)
    opened = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(
        message[33:], b"strata group-key 1\x00room\x00" + header, bytes(range(24)), KEY.secret
    )
    assert opened == b"hello"
    # Recorded once: a change of the format, the key id or the associated data breaks every peer.
    assert message.hex() == (
        "0156b9e2c1d09c32d3" + bytes(range(24)).hex() + "f6a76313ffb374f742373744d98a21fa709c4f8621"
    )


@pytest.mark.req("C-247")
@given(st.binary(max_size=300))
def test_any_content_round_trips_and_never_twice_alike(content: bytes) -> None:
    hook = GroupKeyEncryption("room", KEY)
    one, two = hook.encrypt(content), hook.encrypt(content)
    assert one != two
    assert hook.decrypt(one) == hook.decrypt(two) == content


@pytest.mark.req("C-246", "C-247")
def test_who_has_no_key_or_another_reads_nothing() -> None:
    message = GroupKeyEncryption("room", KEY).encrypt(b"hello")
    with pytest.raises(DecryptionFailed):
        GroupKeyEncryption("room", OTHER).decrypt(message)


@pytest.mark.req("C-247")
def test_a_message_does_not_decrypt_in_another_channel() -> None:
    message = GroupKeyEncryption("room", KEY).encrypt(b"hello")
    with pytest.raises(DecryptionFailed):
        GroupKeyEncryption("hall", KEY).decrypt(message)


@pytest.mark.req("C-247", "C-302")
def test_no_byte_may_change_and_no_length_crashes() -> None:
    hook = GroupKeyEncryption("room", KEY)
    message = hook.encrypt(b"hello")
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        with pytest.raises(DecryptionFailed):
            hook.decrypt(bytes(changed))
    for length in range(len(message)):
        with pytest.raises(DecryptionFailed):
            hook.decrypt(message[:length])
    with pytest.raises(DecryptionFailed):
        hook.decrypt(message + b"\x00")


@given(st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecryptionFailed):
        GroupKeyEncryption("room", KEY).decrypt(b"\x01" + KEY.key_id + data)


def test_keys_are_rotated_without_a_gap() -> None:
    old, both = GroupKeyEncryption("room", KEY), GroupKeyEncryption("room", [KEY, OTHER])
    new = GroupKeyEncryption("room", [OTHER, KEY])
    assert both.decrypt(new.encrypt(b"from the new")) == b"from the new"
    assert new.decrypt(old.encrypt(b"from the old")) == b"from the old"
    assert old.decrypt(both.encrypt(b"still the old key")) == b"still the old key"
    with pytest.raises(GroupKeyError):
        GroupKeyEncryption("room", [])


def test_a_hook_in_use_takes_other_keys_or_keeps_its_own() -> None:
    here, there = GroupKeyEncryption("room", KEY), GroupKeyEncryption("room", OTHER)
    before = here.encrypt(b"before")
    here.use((OTHER, KEY))
    assert there.decrypt(here.encrypt(b"after")) == b"after" and here.decrypt(before) == b"before"
    with pytest.raises(GroupKeyError):
        here.use(())
    assert there.decrypt(here.encrypt(b"as before")) == b"as before"


def test_a_key_does_not_show_itself() -> None:
    secret = KEY.secret
    hook = GroupKeyEncryption("room", [KEY, OTHER])
    for shown in (repr(KEY), str(KEY), repr(hook), f"{KEY}"):
        assert KEY.key_id.hex() in shown
        assert secret.hex() not in shown and repr(secret)[2:-1] not in shown
    for thief in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="save"):
            thief(KEY)
    with pytest.raises(GroupKeyError) as caught:
        GroupKey(b"short")
    assert "short" not in str(caught.value)
    assert KEY == GroupKey(secret) and hash(KEY) == hash(GroupKey(secret))
    assert KEY != OTHER and KEY != secret
    assert GroupKey.generate() != GroupKey.generate()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "room.key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert GroupKey.load(path) == KEY
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    assert GroupKey.load(path) == KEY
    os.chmod(path, 0o640)
    with pytest.raises(GroupKeyError, match="chmod 600"):
        GroupKey.load(path)


def test_half_a_key_file_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        KEY.save(tmp_path / "room.key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda members: members.pop("key"),
        lambda members: members.update(key="0x" + "ab" * 31),
        lambda members: members.update(key="0x" + "ab" * 32),  # another key than the id names
        lambda members: members.update(key=members["key"][2:]),
        lambda members: members.update(key=5),
        lambda members: members.update(kind="something else"),
    ],
)
def test_damaged_key_files(tmp_path: Path, change: object) -> None:
    path = tmp_path / "room.key"
    KEY.save(path)
    members = json.loads(path.read_text())
    change(members)  # type: ignore[operator]
    path.write_text(json.dumps(members))
    with pytest.raises(GroupKeyError) as caught:
        GroupKey.load(path)
    assert KEY.secret.hex() not in str(caught.value)
    path.write_text("[" * 5000)
    with pytest.raises(GroupKeyError):
        GroupKey.load(path)


@pytest.mark.req("C-245", "C-246")
def test_the_documentation_says_what_is_visible() -> None:
    text = " ".join((encryption.__doc__ or "").split())
    for phrase in (
        "Without a hook nothing",
        "the id and causal history of each message",
        "the index",
        "the count",
        "cannot decrypt receives nothing",
    ):
        assert phrase in text
