"""The sender id that a channel makes for itself: one for each device of each identity (C-006, C-287).

A program that names no sender gets a random name, or with `sender_binding="did"` the name `DID#device`. Every
participant can check that the identity signed it, and two devices of one person are two participants. The
name stays in the store, so that after a restart the program continues as the same participant. One store may
serve several identities; each has its own name there.
"""

from __future__ import annotations

import asyncio
import random
from weakref import WeakValueDictionary

from strata.channels.persistence.interface import Change, ParticipantKey, Persistence
from strata.channels.persistence.records import SenderName, put, read_records, remove

__all__ = ["check_device", "name_sender"]

_MAX_DEVICE_BYTES = 64
_UNOWNED = "current"
"""The key under which earlier versions kept the only name of a store."""

_turns: WeakValueDictionary[tuple[int, int, str], asyncio.Lock] = WeakValueDictionary()
"""What openings hold while they name a sender, by the `id()` of the event loop and of the store, and by the
channel. Two first openings at once would make two names, of which the store keeps one: what was sent under
the other would never be found again."""


def check_device(device: str) -> str:
    """Return the name of a device. Raises `ValueError` if it cannot follow a DID."""
    if not 0 < len(device.encode()) <= _MAX_DEVICE_BYTES or "#" in device or not device.isprintable():
        raise ValueError(f"a device needs a name of 1 to {_MAX_DEVICE_BYTES} printable bytes, without '#'")
    return device


async def name_sender(
    store: Persistence, channel_id: str, identity: str, rng: random.Random, *, bound: bool, device: str | None
) -> str:
    """Return the sender id of this identity's device, from the store, or made and stored there.

    `bound`: the identity must prove the id; `device` names the device. Raises `PersistenceError`.
    """
    if bound and device is not None:
        return f"{identity}#{check_device(device)}"
    place = id(asyncio.get_running_loop()), id(store), channel_id
    turn = _turns.setdefault(place, asyncio.Lock())
    async with turn:
        if not bound:
            return await _kept(store, channel_id, identity, f"{rng.getrandbits(128):032x}")
        return await _kept(store, channel_id, f"{identity}#", f"{identity}#{rng.getrandbits(48):012x}")


async def _kept(store: Persistence, channel_id: str, owner: str, fresh: str) -> str:
    """Return the name that the store has for an owner, or had before names had owners; else `fresh`."""
    key = ParticipantKey(channel_id, "")
    names = await _names(store, key)
    known = names.get(owner)
    if known is not None:
        return known.sender_id
    changes: list[Change] = []
    name = fresh
    if owner.endswith("#"):
        # Before devices had names, the DID itself was the sender, and its state is stored under the DID.
        did = owner.removesuffix("#")
        if (await store.load(ParticipantKey(channel_id, did))).records:
            name = did
    elif _UNOWNED in names:
        name = names[_UNOWNED].sender_id
        changes.append(remove(SenderName, _UNOWNED))
    await store.apply(key, [*changes, put(SenderName(name, owner))])
    return name


async def _names(store: Persistence, key: ParticipantKey) -> dict[str, SenderName]:
    return read_records(SenderName, (await store.load(key)).records.get(SenderName.KIND, {}))
