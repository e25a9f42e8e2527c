"""Section 5: key validity and key events.

Every check has its own identity, whose first key is the one in its DID. KEY_EVENTs add, rotate and revoke
further keys.
"""

from __future__ import annotations

from strata.protocol.ids import Identity, Signer
from strata.protocol.packets import Packet

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import KeyOf, publish_text
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal, shorten

__all__ = ["CHECKS", "Keys"]

CHECKS = Group(5)

_HOUR = 3600


class Keys:
    """An identity with two keys, and its key events and packets."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.first: Identity = context.identity()
        self.did = self.first.did
        self.first_id = f"{self.did}#keys-1"
        self._second = context.identity()
        self.second = KeyOf(self.did, self._second)
        self.second_id = f"{self.did}#keys-2"

    def event(self, kind: str, signer: Signer | None = None, **members: object) -> Packet:
        """A KEY_EVENT, signed by the first key unless another is given; `...` removes a member."""
        content = {"type": "KEY_EVENT", "event": kind, **members}
        content = {name: value for name, value in content.items() if value is not ...}
        return self.context.build(signer or self.first, content)

    def add(self, signer: Signer | None = None, **members: object) -> Packet:
        """An ADD of the second key, valid since a minute ago unless `members` says otherwise."""
        return self.event("ADD", signer, **self._new_key() | members)

    def rotate(self, **members: object) -> Packet:
        """A ROTATE of the first key to the second."""
        return self.event("ROTATE", **self._new_key() | {"replaces": self.first_id} | members)

    def revoke(self, key_id: str, signer: Signer | None = None, *, ago: int = 1, **members: object) -> Packet:
        """A REVOKE of a key, as of `ago` seconds before now."""
        revoked = {"key_id": key_id, "revoked_at": self.context.now() - ago, "reason": "conformance"}
        return self.event("REVOKE", signer, **revoked | members)

    def by_first(self, *, age: int = 0, n: int = 0) -> Packet:
        """A packet by the first key."""
        return self.context.packet(self.first, age=age, n=n)

    def by_second(self, *, age: int = 0) -> Packet:
        """A packet by the second key."""
        return self.context.packet(self.second, age=age)

    def _new_key(self) -> Message:
        return {
            "key_id": self.second_id,
            "public_key_multibase": self._second.did.removeprefix("did:strata:"),
            "valid_from": self.context.now() - 60,
            "valid_until": 0,
            "revoked_at": None,
        }


async def _refused(peer: Peer, packet: Packet, code: str, context: Context) -> None:
    """Expect the packet to be refused: with this code if the relay announces our decisions, else with any."""
    answer = await peer.publish(packet)
    expect_error(answer, *([code] if context.subject.announces(DECISIONS) else []))


@CHECKS("R-066", "R-068", source="RFC-0001 §5.4; decision A-024")
async def added_keys_sign(context: Context) -> None:
    """After an ADD by a live key, either key signs packets"""
    keys = Keys(context)
    async with context.connect() as peer:
        expect_error(await peer.publish(keys.by_second()), "invalid_signature")
        await peer.store(keys.add())
        await peer.store(keys.by_second(), keys.by_first(), keys.by_second())


@CHECKS("R-068", source="RFC-0001 §5.4")
async def keys_do_not_add_themselves(context: Context) -> None:
    """A KEY_EVENT signed by the key it adds is refused"""
    keys = Keys(context)
    async with context.connect() as peer:
        expect_error(await peer.publish(keys.add(keys.second)))
        expect_error(await peer.publish(keys.by_second()), "invalid_signature")


@CHECKS("R-062", "R-067", "R-070", source="RFC-0001 §5.4, §11.1; decision A-025")
async def keys_have_their_window(context: Context) -> None:
    """A key signs neither before its window (`key_not_yet_valid`) nor after it (`key_expired`)"""
    now = context.now()
    async with context.connect() as peer:
        early = Keys(context)
        await peer.store(early.add(valid_from=now + _HOUR))
        await _refused(peer, early.by_second(), "key_not_yet_valid", context)
        await _refused(peer, early.revoke(early.first_id, early.second), "key_not_yet_valid", context)
        late = Keys(context)
        await peer.store(late.add(valid_from=now - 2 * _HOUR, valid_until=now - _HOUR))
        await _refused(peer, late.by_second(), "key_expired", context)
        await peer.store(early.by_first(), late.by_first())


@CHECKS("R-062", source="RFC-0001 §5.4; RFC-0000 §6.1")
async def windows_have_a_skew(context: Context) -> None:
    """A window extends beyond its ends by the clock skew: a key that begins in 30 s can sign now"""
    keys = Keys(context)
    async with context.connect() as peer:
        await peer.store(keys.add(valid_from=context.now() + 30))
        await peer.store(keys.by_second())


@CHECKS("R-063", source="RFC-0001 §5.4, §8")
async def back_dating_opens_no_window(context: Context) -> None:
    """A packet dated into a key's window is refused once the window is over: the time of arrival counts"""
    now = context.now()
    keys = Keys(context)
    async with context.connect() as peer:
        await peer.store(keys.add(valid_from=now - 2 * _HOUR, valid_until=now - _HOUR))
        await _refused(peer, keys.by_second(age=_HOUR + 600), "key_expired", context)


@CHECKS("R-069", "R-067", "R-076", source="RFC-0001 §5.4; decision A-028")
async def keys_revoke_themselves(context: Context) -> None:
    """A REVOKE by the key it revokes is stored and forwarded; the next packet by that key is `key_revoked`"""
    keys = Keys(context)
    async with context.connect() as peer:
        await peer.subscribe("s", {"authors": [keys.did], "types": ["KEY_EVENT"]})
        revoke = keys.revoke(keys.first_id)
        await peer.store(keys.by_first(), revoke)
        expect_equal(ids_of(await peer.events("s", 1)), [revoke.packet_id], "the REVOKE, forwarded")
        await _refused(peer, keys.by_first(), "key_revoked", context)
        await _refused(peer, keys.by_first(age=600), "key_revoked", context)


@CHECKS("R-071", source="RFC-0001 §5.4; decision A-026", extension=DECISIONS)
async def key_events_are_whole(context: Context) -> None:
    """A KEY_EVENT without the well-formed members that its kind needs is `invalid_schema`"""
    keys = Keys(context)
    broken = [
        keys.add(key_id=...),
        keys.add(key_id="did:strata:other#keys-2"),
        keys.add(key_id=f"{keys.did}keys-2"),
        keys.add(public_key_multibase=...),
        keys.add(public_key_multibase="zzz"),
        keys.add(valid_from=...),
        keys.add(valid_from="now"),
        keys.rotate(replaces=...),
        keys.rotate(replaces=f"{keys.did}#keys-9"),
        keys.revoke(keys.first_id, revoked_at=...),
        keys.event(..., key_id=keys.first_id),  # type: ignore[arg-type]
    ]
    async with context.connect() as peer:
        for event in broken:
            answer = await peer.publish(event)
            if answer.get("code") != "invalid_schema":
                raise Failed(f"ERROR invalid_schema for {shorten(event.content)}", shorten(answer))
        await peer.store(keys.by_first())


@CHECKS("R-071", source="decision A-026", extension=DECISIONS)
async def unknown_key_events_have_no_effect(context: Context) -> None:
    """A KEY_EVENT of an unknown kind is stored and changes nothing"""
    keys = Keys(context)
    async with context.connect() as peer:
        await peer.store(keys.event("PAUSE", key_id=keys.first_id))
        await peer.store(keys.by_first())


@CHECKS("R-072", source="RFC-0001 §5.4; decision A-027", extension=DECISIONS)
async def rotation_ends_the_old_key(context: Context) -> None:
    """A ROTATE ends the replaced key when the new one begins: until then the old signs, afterwards the new"""
    now = context.now()
    async with context.connect() as peer:
        past = Keys(context)
        await peer.store(past.rotate(valid_from=now - _HOUR))
        await peer.store(past.by_second())
        expect_error(await peer.publish(past.by_first()), "key_expired")
        ahead = Keys(context)
        await peer.store(ahead.rotate(valid_from=now + _HOUR))
        await peer.store(ahead.by_first())
        expect_error(await peer.publish(ahead.by_second()), "key_not_yet_valid")


@CHECKS("R-073", source="RFC-0001 §5.4")
async def the_chain_is_served(context: Context) -> None:
    """An author's key events are found by author and type, in the order in which they took effect"""
    keys = Keys(context)
    events = [keys.add(), keys.revoke(keys.first_id, keys.second)]
    async with context.connect() as peer:
        for event in events:
            await peer.store(event)
        history = await peer.subscribe("s", {"authors": [keys.did], "types": ["KEY_EVENT"]})
        expect_equal(history.ids, [event.packet_id for event in events], "the whole chain")


@CHECKS("R-074", "R-133", source="RFC-0001 §5.4; decision A-026")
async def events_take_effect_at_once(context: Context) -> None:
    """Key events apply to what follows on the same socket: an added key signs, a revoked key does not"""
    keys = Keys(context)
    frames = {
        "add": keys.add(),
        "new": keys.by_second(),
        "revoke": keys.revoke(keys.first_id, keys.second),
        "old": keys.by_first(),
        "last": keys.by_second(),
    }
    async with context.connect() as peer:
        for name, packet in frames.items():
            await peer.send(publish_text(packet, name))
        kinds = {name: (await peer.answer_to(name)).get("type") for name in frames}
        wanted = {"add": "OK", "new": "OK", "revoke": "OK", "old": "ERROR", "last": "OK"}
        expect_equal(kinds, wanted, "answers to ADD, the new key, REVOKE, the revoked key, the new key")


@CHECKS("R-077", "R-078", source="RFC-0001 §5.4; decision A-028, A-029")
async def revocation_hides_nothing(context: Context) -> None:
    """After a back-dated REVOKE, packets received earlier are still served, and new ones are refused"""
    keys = Keys(context)
    packets = [keys.by_first(n=n) for n in range(3)]
    async with context.connect() as peer:
        await peer.store(*packets)
        await peer.store(keys.revoke(keys.first_id, ago=_HOUR))
        history = await peer.subscribe("s", {"authors": [keys.did], "types": ["POST"]})
        expect_equal(history.ids, [packet.packet_id for packet in packets], "the packets from before")
        expect(
            all(isinstance(e.get("received_at"), int) for e in history.events), "received_at", history.events
        )
        await _refused(peer, keys.by_first(), "key_revoked", context)


@CHECKS("R-079", "R-081", source="RFC-0001 §5.3")
async def undeclared_recovery_is_refused(context: Context) -> None:
    """A RECOVERY_APPROVAL by a key that is not declared for recovery, or for an unknown event, is refused"""
    keys = Keys(context)
    event = keys.add()
    approval = {"type": "RECOVERY_APPROVAL", "approved_at": context.now()}
    async with context.connect() as peer:
        await peer.store(event)
        stranger = KeyOf(keys.did, context.identity())
        for signer, target in (
            (stranger, event.packet_id),
            (keys.first, event.packet_id),
            (keys.first, "0x" + "12" * 32),
        ):
            expect_error(await peer.publish(context.build(signer, {**approval, "target_event": target})))
        foreign = context.build(context.identity(), {**approval, "target_event": event.packet_id})
        expect_error(await peer.publish(foreign))


@CHECKS("R-083", source="RFC-0001 §5.3.1")
async def approvals_change_no_keys(context: Context) -> None:
    """An approval without an event changes no key"""
    keys = Keys(context)
    content = {"type": "RECOVERY_APPROVAL", "approved_at": context.now(), "target_event": "0x" + "12" * 32}
    async with context.connect() as peer:
        await peer.publish(context.build(keys.first, content))
        expect_ok(await peer.publish(keys.by_first()))
        expect_error(await peer.publish(keys.by_second()), "invalid_signature")
