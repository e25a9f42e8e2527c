"""Section 4: DIDs."""

from __future__ import annotations

from strata.protocol.ids import base58_encode, is_did

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import KeyOf, members, seal
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, expect

__all__ = ["CHECKS"]

CHECKS = Group(4)

_SECP256K1_MULTICODEC = b"\xe7\x01"


@CHECKS("R-044", source="RFC-0001 §3.1")
async def the_relay_has_a_did(context: Context) -> None:
    """The relay's own identity, if it shows one, is a DID"""
    relay_id = context.subject.relay_id
    expect(relay_id is None or is_did(relay_id), "a DID as relay_id and server_id", relay_id)


@CHECKS("R-045", "R-060", source="RFC-0101 §7.2; RFC-0001 §5.4")
async def new_dids_publish(context: Context) -> None:
    """The first packet of a self-certifying DID verifies without a known document"""
    async with context.connect() as peer:
        expect_ok(await peer.publish(context.packet(context.identity())))


@CHECKS("R-046", source="RFC-0101 §7.2; decision A-018", extension=DECISIONS)
async def bare_keys_are_dids(context: Context) -> None:
    """A DID that is the bare key in base58 is self-certifying too"""
    key = context.identity()
    signer = KeyOf("did:strata:z" + base58_encode(key.public_key), key)
    async with context.connect() as peer:
        expect_ok(await peer.publish(context.packet(signer)))


@CHECKS("R-047", "R-059", source="RFC-0001 §3.3; decision A-019", extension=DECISIONS)
async def unresolved_names_are_refused(context: Context) -> None:
    """A DID whose key, or kind of key, is not known is `invalid_signature`, detail `unresolved_key`"""
    author = context.identity()
    foreign = "did:strata:z" + base58_encode(_SECP256K1_MULTICODEC + b"\x02" + author.public_key)
    async with context.connect() as peer:
        for did in ("did:strata:relay_1", "did:example:nobody", foreign):
            answer = await peer.publish(seal(author, members(context.packet(author), author_id=did)))
            expect_error(answer, "invalid_signature", detail="unresolved_key")


@CHECKS("R-058", source="decision A-022", level=Keyword.SHOULD, extension=DECISIONS)
async def dids_are_resolved_over_http(context: Context) -> None:
    """`GET /did/{did}` returns what the relay knows about an author"""
    author = context.identity()
    async with context.connect() as peer:
        await peer.store(context.packet(author))
        answer = await context.get(f"/did/{author.did}")
        expect(
            answer.status == 200 and isinstance(answer.json(), dict), "200 and a JSON object", answer.status
        )
