"""Sections 4 and 5: DID Documents and recovery.

Documents reach a relay in DID_DOCUMENT packets, which are an addition of this project. If the relay does not
know them, these rows cannot be judged from outside.
"""

from __future__ import annotations

import asyncio

from blake3 import blake3
from strata.protocol import canonical
from strata.protocol.ids import Identity, base58_encode
from strata.protocol.packets import Packet

from strata_testkit.conformance.checks.keys import Keys
from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import KeyOf, auth_message
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal, shorten

__all__ = ["CHECKS"]

CHECKS = Group(4)


def _method(did: str, name: str, key: Identity, **changes: object) -> Message:
    method = {
        "id": f"{did}#{name}",
        "type": "Ed25519VerificationKey2020",
        "controller": did,
        "public_key_hex": "0x" + key.public_key.hex(),
        "public_key_multibase": key.did.removeprefix("did:strata:"),
        "valid_from": 1_750_000_000,
        "valid_until": 0,
        **changes,
    }
    return {member: value for member, value in method.items() if value is not ...}


def _document(author: Identity, *methods: Message, **changes: object) -> Message:
    """A document with the author's own key and further methods; all but recovery keys sign everything."""
    listed = [_method(author.did, "keys-1", author), *methods]
    signing = [method["id"] for method in listed if method.get("usage") != "recovery"]
    document = {
        "id": author.did,
        "verification_method": listed,
        "authentication": signing,
        "assertion": signing,
        "created_at": 1_750_000_000,
        "prev_did_doc_hash": None,
        **changes,
    }
    return {member: value for member, value in document.items() if value is not ...}


def _hash(document: Message) -> str:
    return "z" + base58_encode(b"\x1e\x20" + blake3(canonical.encode(document)).digest())


def _publication(context: Context, author: Identity, document: Message) -> Packet:
    return context.build(author, {"type": "DID_DOCUMENT", "document": document})


@CHECKS("R-026", "R-049", "R-051", source="RFC-0001 §3.2, §5.4; decision A-021", extension=DECISIONS)
async def documents_are_whole(context: Context) -> None:
    """A document that lacks methods, windows or the DID's own key, or contradicts itself, is refused"""
    author, other = context.identity(), context.identity()
    did = author.did
    own = _method(did, "keys-1", author)
    wrong = [
        _document(author, verification_method=[]),
        _document(author, verification_method=...),
        _document(author, verification_method=[{**own, "valid_from": None}]),
        _document(author, verification_method=[_method(did, "keys-1", author, valid_from=...)]),
        _document(author, verification_method=[{**own, "controller": other.did}]),
        _document(author, verification_method=[{**own, "id": f"{other.did}#keys-1"}]),
        _document(author, verification_method=[{**own, "public_key_hex": "0x" + other.public_key.hex()}]),
        _document(author, verification_method=[_method(did, "keys-1", other)]),
        _document(author, id=other.did),
    ]
    async with context.connect() as peer:
        for document in wrong:
            answer = await peer.publish(_publication(context, author, document))
            if answer.get("code") != "invalid_schema":
                raise Failed(f"ERROR invalid_schema for {shorten(document)}", shorten(answer))
        await peer.store(context.packet(author))


@CHECKS("R-061", source="RFC-0001 §3.2; decision A-023", extension=DECISIONS)
async def documents_say_what_keys_do(context: Context) -> None:
    """A key in `assertion` signs packets and a key in `authentication` signs AUTH, and no other does"""
    author, asserting, entering = (context.identity() for _ in range(3))
    own = f"{author.did}#keys-1"
    document = _document(
        author,
        _method(author.did, "keys-2", asserting),
        _method(author.did, "keys-3", entering),
        assertion=[own, f"{author.did}#keys-2"],
        authentication=[own, f"{author.did}#keys-3"],
    )
    async with context.connect() as peer:
        await peer.store(_publication(context, author, document))
        await peer.store(context.packet(KeyOf(author.did, asserting)), context.packet(author))
        refused = context.packet(KeyOf(author.did, entering))
        expect_error(await peer.publish(refused), "invalid_signature")
    if context.subject.sends_challenge:
        answer = await _auth(context, KeyOf(author.did, entering))
        expect(answer.get("type") == "AUTH_OK", "AUTH_OK for the key listed in authentication", answer)
        expect_error(await _auth(context, KeyOf(author.did, asserting)), "invalid_signature")


async def _auth(context: Context, key: KeyOf) -> Message:
    """The answer to AUTH by this key, on a new session."""
    async with context.connect(anonymous=True) as peer:
        return await peer.ask(auth_message(key, await peer.challenge()))


@CHECKS("R-052", "R-053", source="RFC-0001 §3.3; decision A-010", extension=DECISIONS)
async def documents_follow_one_another(context: Context) -> None:
    """A newer document links to the head by its multibase hash; an unlinked one is refused"""
    author = context.identity()
    first = _document(author)
    in_hex = "0x" + blake3(canonical.encode(first)).hexdigest()
    async with context.connect() as peer:
        await peer.store(_publication(context, author, first))
        for wrong in (None, in_hex, _hash({"another": 1})):
            document = _document(author, created_at=1_750_000_001, prev_did_doc_hash=wrong)
            expect_error(await peer.publish(_publication(context, author, document)), "invalid_schema")
        second = _document(author, created_at=1_750_000_002, prev_did_doc_hash=_hash(first))
        await peer.store(_publication(context, author, second), context.packet(author))


@CHECKS("R-054", source="RFC-0001 §3.3", extension=DECISIONS)
async def forks_fail_closed(context: Context) -> None:
    """Once a document has two successors, no key of the DID resolves any more"""
    author = context.identity()
    first = _document(author)
    heads = [
        _document(author, created_at=1_750_000_000 + number, prev_did_doc_hash=_hash(first))
        for number in (1, 2)
    ]
    async with context.connect() as peer:
        await peer.store(_publication(context, author, first))
        await peer.store(_publication(context, author, heads[0]), context.packet(author))
        expect_ok(await peer.publish(_publication(context, author, heads[1])))
        expect_error(await peer.publish(context.packet(author)), "invalid_signature")


async def _with_recovery(context: Context, peer: Peer, threshold: object = 2) -> tuple[Keys, list[KeyOf]]:
    """An identity that has declared three recovery keys, and those keys."""
    keys = Keys(context)
    recovery = [context.identity() for _ in range(3)]
    methods = [
        _method(keys.did, f"recovery-{number}", key, usage="recovery") for number, key in enumerate(recovery)
    ]
    document = _document(keys.first, *methods, recovery_policy={"threshold": threshold, "key_ids": []})
    await peer.store(_publication(context, keys.first, document))
    # Packets of the same second apply in the order of ids, and events must follow the document.
    await asyncio.sleep(1.1)
    return keys, [KeyOf(keys.did, key) for key in recovery]


@CHECKS("R-080", source="RFC-0001 §5.3", extension=DECISIONS)
async def recovery_keys_sign_recovery_alone(context: Context) -> None:
    """A packet or AUTH by a recovery key is refused, detail `recovery_key_not_allowed`"""
    async with context.connect() as peer:
        keys, recovery = await _with_recovery(context, peer)
        answer = await peer.publish(context.packet(recovery[0]))
        expect_error(answer, "invalid_signature", detail="recovery_key_not_allowed")
        await peer.store(keys.by_first())
    if context.subject.sends_challenge:
        expect_error(await _auth(context, recovery[0]), "invalid_signature", "unauthenticated")


@CHECKS(
    "R-081",
    "R-084",
    "R-087",
    "R-088",
    "R-190",
    source="RFC-0001 §5.3, §5.3.1; decision A-057",
    extension=DECISIONS,
)
async def recovery_waits(context: Context) -> None:
    """A recovery-signed KEY_EVENT is QUEUED, and approvals do not shorten the delay before it takes effect"""
    async with context.connect() as peer:
        keys, recovery = await _with_recovery(context, peer)
        event = keys.add(recovery[0])
        answer = expect_ok(await peer.publish(event), event)
        expect_equal(answer.get("status"), "QUEUED", "the status of a pending event")
        history = await peer.subscribe("s", {"authors": [keys.did], "types": ["KEY_EVENT"]})
        expect_equal(history.ids, [event.packet_id], "the pending event, served")
        approval = {
            "type": "RECOVERY_APPROVAL",
            "target_event": event.packet_id,
            "approved_at": context.now(),
        }
        await peer.store(*(context.build(key, approval) for key in recovery[1:]))
        expect_error(await peer.publish(keys.by_second()))
        await peer.store(keys.by_first())


@CHECKS("R-086", source="RFC-0001 §5.3; decision A-030", level=Keyword.SHOULD, extension=DECISIONS)
async def live_keys_override_recovery(context: Context) -> None:
    """While a recovery is pending, a KEY_EVENT by a live key about the same key takes its place"""
    async with context.connect() as peer:
        keys, recovery = await _with_recovery(context, peer)
        await peer.store(keys.add(recovery[0]))
        await peer.store(keys.add())
        await peer.store(keys.by_second())


@CHECKS("R-085", source="RFC-0001 §5.3.1", extension=DECISIONS)
async def impossible_policies_fail_closed(context: Context) -> None:
    """Under a threshold that the recovery keys cannot reach, recovery-signed events are refused"""
    async with context.connect() as peer:
        keys, recovery = await _with_recovery(context, peer, threshold=5)
        expect_error(await peer.publish(keys.add(recovery[0])), detail="recovery_policy_invalid")
