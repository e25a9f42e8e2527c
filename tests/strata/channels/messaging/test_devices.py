"""People with several devices: who hears whom, who counts as whom, and who signed what."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from strata.channels.messaging import RelayNode
from strata.channels.persistence import MemoryPersistence
from strata.channels.persistence.interface import Change, ParticipantKey, StoredState
from strata.channels.persistence.records import SenderName, put
from strata.channels.reliable import InvalidConfiguration, ReliableChannel, make_channel
from strata.channels.reliable.naming import name_sender
from strata.channels.sds import SdsMessage
from strata.protocol.errors import RequestTimeout
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet

from tests.support.made_relays import (
    ALICE,
    BOB,
    CAROL,
    MALLORY,
    TOPIC,
    Log,
    MadeRelays,
    until,
)
from tests.support.virtual_time import virtually, wall


class Device:
    """A person's device, and the events it got."""

    def __init__(
        self,
        log: Log,
        identity: Signer,
        name: str | None = None,
        *,
        is_genuine: Callable[[Packet], Awaitable[bool]] | None = None,
        **options: Any,
    ) -> None:
        self.relays = MadeRelays(log)
        self.node = RelayNode(self.relays, identity=identity, wall=wall, is_genuine=is_genuine)
        self.channel: ReliableChannel = make_channel(self.node, "room", TOPIC, name, options=options)
        self.heard: list[Any] = []
        self.events: list[Any] = []
        for each in self.channel.message_events.names:
            self.channel.message_events.on(each, self.events.append)
        self.channel.message_events.on("message-received", self.heard.append)

    def told(self, name: str) -> list[Any]:
        return [event for event in self.events if event.name == name]

    @property
    def texts(self) -> set[bytes]:
        assert len({each.payload for each in self.heard}) == len(self.heard), "nothing twice"
        return {each.payload for each in self.heard}

    async def __aenter__(self) -> Device:
        await self.channel.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.node.close()


# Who hears whom.


@pytest.mark.req("C-006", "C-287")
@pytest.mark.parametrize("binding", ["off", "did"])
@virtually
async def test_two_devices_of_one_person_hear_everybody_and_each_other(binding: str) -> None:
    log = Log()
    async with (
        Device(log, ALICE, sender_binding=binding) as phone,
        Device(log, ALICE, sender_binding=binding) as laptop,
        Device(log, BOB, sender_binding=binding) as bob,
    ):
        devices = {b"phone": phone, b"laptop": laptop, b"bob": bob}
        for text, device in devices.items():
            await device.channel.send(text)
        await until(lambda: all(each.texts == set(devices) - {text} for text, each in devices.items()))
        await until(lambda: all(each.told("reliable:message:delivered") for each in devices.values()))
        for device in devices.values():
            assert device.channel.statistics.senders_forged == 0
            assert device.channel.health.sender_conflict is None
        authors = {each.payload: each.author for device in devices.values() for each in device.heard}
        assert authors == {b"phone": ALICE.did, b"laptop": ALICE.did, b"bob": BOB.did}
        senders = {each.sender_id for each in bob.heard}
        assert len(senders) == 2
        if binding == "did":
            assert {sender.partition("#")[0] for sender in senders} == {ALICE.did}
            assert {each.device for each in bob.heard} == {sender.partition("#")[2] for sender in senders}


@pytest.mark.req("C-287")
@virtually
async def test_a_device_in_the_name_of_another_person_is_dropped_and_counted() -> None:
    log = Log()
    async with (
        Device(log, BOB, sender_binding="did") as bob,
        Device(log, MALLORY, f"{ALICE.did}#phone") as mallory,
        Device(log, ALICE, sender_binding="did", device="phone") as alice,
    ):
        assert alice.channel.sender_id == f"{ALICE.did}#phone"
        await mallory.channel.send(b"I am Alice's phone")
        await until(lambda: bob.channel.statistics.senders_forged)
        await alice.channel.send(b"no, I am")
        await until(lambda: bob.heard)
        await asyncio.sleep(60)
        assert bob.texts == {b"no, I am"} and bob.heard[0].device == "phone"


# Names that are kept.


@pytest.mark.req("C-006")
@pytest.mark.parametrize("binding", ["off", "did"])
@virtually
async def test_two_identities_on_one_store_have_two_names_and_keep_them(binding: str) -> None:
    log, store = Log(), MemoryPersistence()
    options: dict[str, Any] = {"sender_binding": binding, "persistence": store}
    named: list[set[str]] = []
    for turn in range(2):
        async with Device(log, ALICE, **options) as alice, Device(log, BOB, **options) as bob:
            named.append({alice.channel.sender_id, bob.channel.sender_id})
            await alice.channel.send(b"hello %d" % turn)
            await until(bob.heard.__len__)
    assert len(named[0]) == 2 and named[0] == named[1]


class Slow(MemoryPersistence):
    """A store that lets other tasks run during its loads and changes."""

    async def load(self, participant: ParticipantKey) -> StoredState:
        await asyncio.sleep(0.1)
        return await super().load(participant)

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        await asyncio.sleep(0.1)
        await super().apply(participant, changes)


async def names(store: Any, *identities: str, bound: bool = False) -> list[str]:
    rng = random.Random(1)
    return [
        await name_sender(store, "room", identity, rng, bound=bound, device=None) for identity in identities
    ]


@pytest.mark.req("C-006")
@virtually
async def test_the_one_name_of_an_earlier_version_goes_to_the_first_identity_that_comes() -> None:
    store = Slow()
    await store.apply(ParticipantKey("room", ""), [put(SenderName("of old"))])
    first, second = await names(store, "did:a", "did:b")
    assert first == "of old" != second
    assert await names(store, "did:b", "did:a") == [second, first]


@pytest.mark.req("C-006")
@virtually
async def test_two_identities_that_come_at_once_do_not_both_take_the_name_of_old() -> None:
    store = Slow()
    await store.apply(ParticipantKey("room", ""), [put(SenderName("of old"))])
    rng = random.Random(1)
    found = await asyncio.gather(
        *(name_sender(store, "room", each, rng, bound=False, device=None) for each in ("did:a", "did:b"))
    )
    assert len(set(found)) == 2
    assert await names(store, "did:a", "did:b") == found


@pytest.mark.req("C-006")
@pytest.mark.parametrize("bound", [False, True])
@virtually
async def test_two_first_openings_at_once_make_one_name(bound: bool) -> None:
    store, rng = Slow(), random.Random(1)
    openings = [name_sender(store, "room", "did:a", rng, bound=bound, device=None) for _ in range(3)]
    first, *others = await asyncio.gather(*openings)
    assert others == [first, first] == await names(store, "did:a", "did:a", bound=bound)


@pytest.mark.req("C-006", "C-257")
@virtually
async def test_who_sent_as_the_did_itself_goes_on_as_the_did() -> None:
    log, store = Log(), MemoryPersistence()
    options: dict[str, Any] = {"sender_binding": "did", "persistence": store}
    async with Device(log, ALICE, ALICE.did, **options) as alice:
        await alice.channel.send(b"anybody?")
    async with Device(log, ALICE, **options) as alice, Device(log, BOB, sender_binding="did") as bob:
        assert alice.channel.sender_id == ALICE.did
        await until(lambda: bob.texts == {b"anybody?"})
        await until(lambda: alice.told("reliable:message:delivered"))


@pytest.mark.parametrize("device", ["", "a#b", "x" * 65, "new\nline"])
def test_a_device_whose_name_cannot_stand_behind_a_did_is_refused(device: str) -> None:
    node = RelayNode(MadeRelays(Log()), identity=ALICE, wall=wall)
    with pytest.raises(InvalidConfiguration, match="device"):
        make_channel(node, "room", TOPIC, options={"device": device})


def test_a_device_stands_behind_a_did_alone() -> None:
    node = RelayNode(MadeRelays(Log()), identity=ALICE, wall=wall)
    for sender, options in ((None, {}), ("alice", {"sender_binding": "did"})):
        with pytest.raises(InvalidConfiguration, match="device needs"):
            make_channel(node, "room", TOPIC, sender, options={"device": "phone", **options})


# Which people have a message.


@pytest.mark.parametrize("binding", ["off", "did"])
@virtually
async def test_where_people_count_another_device_of_ones_own_is_nobody(binding: str) -> None:
    log = Log()
    options: dict[str, Any] = {"sender_binding": binding, "acknowledged_by_people": True}
    async with (
        Device(log, ALICE, **options) as phone,
        Device(log, ALICE, **options) as laptop,
    ):
        await phone.channel.send(b"is anybody there?")
        await until(lambda: laptop.texts == {b"is anybody there?"})
        await asyncio.sleep(120)
        assert phone.channel.sync_status().outstanding and not phone.told("message-acknowledged")
        async with Device(log, BOB, **options) as bob:
            await until(lambda: phone.told("reliable:message:delivered"))
            (delivered,) = phone.told("reliable:message:delivered")
            assert delivered.acknowledged_by == (bob.channel.sender_id,)
            assert delivered.people == ((BOB.did,) if binding == "did" else ())
            assert len(laptop.heard) == len(bob.heard) == 1


@pytest.mark.req("C-042", "C-093")
@virtually
async def test_where_devices_count_an_acknowledgement_says_which_one_it_was() -> None:
    log = Log()
    async with (
        Device(log, ALICE, sender_binding="did", device="phone") as phone,
        Device(log, ALICE, sender_binding="did", device="laptop"),
    ):
        await phone.channel.send(b"a note to myself")
        await until(lambda: phone.told("reliable:message:delivered"))
        (acknowledged,) = phone.told("message-acknowledged")
        assert acknowledged.acknowledged_by == (f"{ALICE.did}#laptop",)
        assert acknowledged.people == (ALICE.did,)


@pytest.mark.req("C-136")
@virtually
async def test_a_device_of_the_sender_s_own_spares_no_other_person_the_acknowledgement() -> None:
    """The laptop names the message at once; the other people must still report that they have it."""
    log = Log()
    async with (
        Device(log, ALICE, sender_binding="did", acknowledged_by_people=True) as phone,
        Device(log, ALICE, sender_binding="did") as laptop,
        Device(log, BOB, sender_binding="did") as bob,
    ):
        laptop.channel.message_events.on("message-received", lambda _: laptop.channel.send(b"seen here"))
        await phone.channel.send(b"news")
        began = asyncio.get_running_loop().time()
        ended = await until(lambda: phone.told("reliable:message:delivered"))
        assert ended - began < 5.0 and not phone.channel.statistics.sds.retransmissions
        assert bob.texts == {b"news", b"seen here"}


# Who signed it.


async def missed_and_repaired(binding: str, genuine: Callable[[Packet], bool]) -> tuple[Device, list[Any]]:
    """The phone has sent something that Carol missed, and the laptop repairs it. Return what Carol heard."""
    log = Log()

    async def is_genuine(packet: Packet) -> bool:
        return genuine(packet)

    options: dict[str, Any] = {"sender_binding": binding, "repair_t_min_ms": 2_000, "repair_t_max_ms": 8_000}
    async with (
        Device(log, ALICE, **options) as laptop,
        Device(log, CAROL, is_genuine=is_genuine, **options) as carol,
    ):
        hidden: set[str] = set()
        carol.relays.hides = lambda packet: packet.packet_id in hidden
        async with Device(log, ALICE, **options) as phone:
            log_store = log.store

            def store(packet: Packet) -> None:
                message = SdsMessage.decode(_payload(packet)) if "payload" in packet.content else None
                is_own = "again" not in packet.content
                if is_own and message is not None and message.sender_id == phone.channel.sender_id:
                    hidden.add(packet.packet_id)
                log_store(packet)

            log.store = store  # type: ignore[method-assign]
            await phone.channel.send(b"said by the phone")
            await until(lambda: laptop.texts == {b"said by the phone"})
            await until(lambda: phone.channel.sync_status().is_synced)
        await laptop.channel.send(b"did you hear that?")
        await asyncio.sleep(60)
        return carol, list(carol.heard)


def _payload(packet: Packet) -> bytes:
    return base64.b64decode(str(packet.content["payload"]))


@pytest.mark.req("C-287", "C-294")
@virtually
async def test_a_repair_is_judged_by_the_keys_that_its_author_had() -> None:
    asked: list[str] = []

    def knows(packet: Packet) -> bool:
        asked.append(packet.author_id)
        return True

    _, heard = await missed_and_repaired("did", knows)
    assert [each.payload for each in heard] == [b"said by the phone", b"did you hear that?"]
    assert {each.author for each in heard} == {ALICE.did} and set(asked) == {ALICE.did}


@pytest.mark.req("C-287", "C-294")
@virtually
async def test_a_repair_whose_author_had_no_such_key_is_dropped() -> None:
    _, heard = await missed_and_repaired("did", lambda packet: False)
    assert heard == []


@pytest.mark.req("C-287", "C-294")
@virtually
async def test_a_repair_comes_again_if_the_keys_of_its_author_could_not_be_had() -> None:
    asked: list[str] = []

    def knows(packet: Packet) -> bool:
        asked.append(packet.packet_id)
        if len(asked) == 1:
            raise RequestTimeout("the question for authors' keys", 10)
        return True

    _, heard = await missed_and_repaired("did", knows)
    assert [each.payload for each in heard] == [b"said by the phone", b"did you hear that?"]
    assert len(asked) > 1


@pytest.mark.req("C-294")
@virtually
async def test_whoever_repeats_a_message_without_proof_is_not_taken_for_its_author() -> None:
    _, heard = await missed_and_repaired("off", lambda packet: True)
    said, asked = heard
    assert said.payload == b"said by the phone" and said.author is None and said.sent_at is not None
    assert asked.author == ALICE.did
