"""Section 13: provenance verification."""

from __future__ import annotations

import asyncio
import base64
import hashlib

from strata.protocol import canonical
from strata.protocol.errors import InvalidInput
from strata.protocol.ids import Identity, Signer
from strata.protocol.packets import Packet, byte_hash

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import members, packet_id_of, seal
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal, shorten

__all__ = ["CHECKS"]

CHECKS = Group(13)

_MEDIA_HASH = byte_hash(b"hello")
_CODES = ("missing_proof", "invalid_issuer_chain", "invalid_attestation", "invalid_provenance")


def _header(origin_type: str, **changes: object) -> Message:
    return {"origin_type": origin_type, "genesis_media_hash": _MEDIA_HASH, "edit_history": [], **changes}


def _body(context: Context, author: Identity, header: Message, *, has_media: bool = True) -> Message:
    """The members of a packet about a picture (unless `has_media` is false), without id and signature."""
    content: Message = {"type": "POST", "text": "photo"}
    if has_media:
        content["media"] = [{"media_hash": _MEDIA_HASH, "media_type": "image/jpeg", "size_bytes": 5}]
    packet = context.build(author, content)
    return members(packet, packet_id=..., signature=..., provenance_header=header)


def _attested(body: Message, client_id: str, key: Signer) -> Message:
    """The members with a `client_attestation` by this key (RFC-0002 §11.2, decision A-078)."""
    header: Message = body["provenance_header"]
    media_hash = header.get("genesis_media_hash") or ""
    preimage = canonical.encode(body) + header["origin_type"].encode() + media_hash.encode()
    signature = "0x" + key.sign(hashlib.sha256(preimage).digest()).hex()
    attestation = {"client_id": client_id, "client_version": "1.0.0", "client_signature": signature}
    return {**body, "provenance_header": {**header, "client_attestation": attestation}}


async def _served(peer: Peer, author: Identity, raw: bytes) -> Message:
    """Publish a packet that must be accepted, and return the EVENT that serves it."""
    expect_ok(await peer.publish(raw))
    filters = {"authors": [author.did], "limit": 200}
    events = (await peer.subscribe("served", filters)).events
    await peer.unsubscribe("served")
    for event in events:
        if event["packet"].get("packet_id") == packet_id_of(raw):
            return event
    raise Failed("the packet to be served", f"{len(events)} other packets")


def _origin(event: Message) -> object:
    """The origin according to the relay: that of the annotation, else that of the header (R-212)."""
    note = (event.get("relay_annotations") or {}).get("provenance") or {}
    header = event["packet"].get("provenance_header") or {}
    return note.get("effective_origin_type", header.get("origin_type"))


@CHECKS("R-203", source="RFC-0002 §10.2")
async def unknown_needs_no_proof(context: Context) -> None:
    """`UNKNOWN` is accepted without proof and served unchanged"""
    author = context.identity()
    body = _body(context, author, {"origin_type": "UNKNOWN", "genesis_media_hash": None, "edit_history": []})
    async with context.connect() as peer:
        event = await _served(peer, author, seal(author, body))
        expect_equal(event["packet"]["provenance_header"], body["provenance_header"], "the header")
        expect("relay_annotations" not in event, "no annotation", event.get("relay_annotations"))


@CHECKS("R-204", source="RFC-0000 §7; RFC-0002 §12.1; decision A-087")
async def unheard_of_origins_are_unknown(context: Context) -> None:
    """An unknown `origin_type` is accepted and served as UNKNOWN"""
    author = context.identity()
    async with context.connect() as peer:
        event = await _served(peer, author, seal(author, _body(context, author, _header("SATELLITE"))))
        expect_equal(_origin(event), "UNKNOWN", "the origin served")


@CHECKS("R-205", "R-231", source="RFC-0002 §10.2, §11.2, §11.5; decision A-078")
async def attested_software_stays(context: Context) -> None:
    """SOFTWARE with a valid client attestation stays SOFTWARE"""
    author, client = context.identity(), context.identity()
    raw = seal(author, _attested(_body(context, author, _header("SOFTWARE")), client.did, client))
    async with context.connect() as peer:
        event = await _served(peer, author, raw)
        expect_equal(_origin(event), "SOFTWARE", "the origin served")
        expect(canonical.encode(event["packet"]) == raw, "the packet unchanged", event)


@CHECKS("R-202", "R-206", "R-207", source="RFC-0002 §10.2, §11.5; RFC-0004 §2")
async def unattested_software_is_unknown(context: Context) -> None:
    """SOFTWARE without a client attestation, or with a wrong one, is accepted and served as UNKNOWN"""
    author, client = context.identity(), context.identity()
    body = _body(context, author, _header("SOFTWARE"))
    wrong = _attested(body, client.did, context.identity())
    malformed = {
        **body,
        "provenance_header": {**body["provenance_header"], "client_attestation": {"client_id": 7}},
    }
    async with context.connect() as peer:
        for claim in (body, wrong, malformed):
            event = await _served(peer, author, seal(author, claim))
            expect_equal(_origin(event), "UNKNOWN", "the origin served")


@CHECKS("R-229", source="RFC-0002 §5; decision A-088", extension=DECISIONS)
async def headers_without_media_count(context: Context) -> None:
    """The same rules apply to a header on a packet without media"""
    author = context.identity()
    body = _body(context, author, _header("SOFTWARE", genesis_media_hash=None), has_media=False)
    async with context.connect() as peer:
        expect_equal(_origin(await _served(peer, author, seal(author, body))), "UNKNOWN", "the origin served")


@CHECKS("R-208", "R-209", source="RFC-0002 §11.5; decision A-077", extension=DECISIONS)
async def downgrades_can_be_undone(context: Context) -> None:
    """A downgrade changes only the origin, and its annotation restores the packet that was signed"""
    author = context.identity()
    claim = _attested(_body(context, author, _header("SOFTWARE")), context.identity().did, context.identity())
    raw = seal(author, claim)
    async with context.connect() as peer:
        ok = expect_ok(await peer.publish(raw))
        event = await _served(peer, author, raw)
        for message in (ok, event):
            note = (message.get("relay_annotations") or {}).get("provenance") or {}
            seen = (
                note.get("claimed_origin_type"),
                note.get("effective_origin_type"),
                bool(note.get("reason")),
            )
            expect_equal(seen, ("SOFTWARE", "UNKNOWN", True), "claimed and effective origin and a reason")
            expect_equal(
                note.get("original_provenance_header"), claim["provenance_header"], "the original header"
            )
        restored = canonical.encode({**event["packet"], "provenance_header": claim["provenance_header"]})
        expect(restored == raw, "the signed packet, once the header is put back", restored.decode())
        try:
            Packet.parse(restored).verify()
        except InvalidInput as error:
            raise Failed("a packet that verifies", str(error)) from None
        if "client_attestation" in event["packet"]["provenance_header"]:
            expect_equal(
                event["packet"]["provenance_header"]["origin_type"], "SOFTWARE", "a header served as signed"
            )


@CHECKS("R-214", "R-216", "R-218", source="RFC-0002 §6.4, §10.1, §10.2; decision A-081")
async def models_need_a_chain(context: Context) -> None:
    """AI_MODEL without an issuer chain in the header is refused, `missing_proof`, attested or not"""
    author, client = context.identity(), context.identity()
    body = _body(context, author, _header("AI_MODEL"))
    elsewhere = {**body, "content": {**body["content"], "issuer_chain": _chain(context, author)}}
    async with context.connect() as peer:
        for claim in (body, _attested(body, client.did, client), elsewhere):
            _expect_refused(await peer.publish(seal(author, claim)), "missing_proof", context)


@CHECKS("R-214", "R-217", "R-219", "R-220", source="RFC-0002 §10.2, §10.4; decision A-082")
async def chains_need_a_known_root(context: Context) -> None:
    """A chain that ends at an unknown root is refused, `invalid_issuer_chain`"""
    author = context.identity()
    header = _header("AI_MODEL", issuer_chain=_chain(context, author))
    async with context.connect() as peer:
        answer = await peer.publish(seal(author, _body(context, author, header)))
        _expect_refused(answer, "invalid_issuer_chain", context)
        broken = _header(
            "AI_MODEL", issuer_chain=[{"subject": author.did, "issuer": "x", "certificate": "!"}]
        )
        _expect_refused(
            await peer.publish(seal(author, _body(context, author, broken))), "invalid_issuer_chain", context
        )


@CHECKS("R-215", "R-217", source="RFC-0002 §10.2; decision A-082")
async def hardware_needs_a_device(context: Context) -> None:
    """HARDWARE_SECURE_ENCLAVE without a device signature, a device or a rooted chain is refused"""
    author, device = context.identity(), context.identity()
    proof: Message = {"device_id": device.did, "issuer_chain": _chain(context, device)}
    signed = canonical.encode(_header("HARDWARE_SECURE_ENCLAVE", device_id=device.did))
    proof["device_signature"] = "0x" + device.sign(signed).hex()
    async with context.connect() as peer:
        for missing in ("device_signature", "device_id", "issuer_chain"):
            header = _header("HARDWARE_SECURE_ENCLAVE", **{k: v for k, v in proof.items() if k != missing})
            answer = await peer.publish(seal(author, _body(context, author, header)))
            _expect_refused(answer, "missing_proof", context)
        for wrong in (proof, {**proof, "device_signature": "0x" + "00" * 64}):
            header = _header("HARDWARE_SECURE_ENCLAVE", **wrong)
            answer = await peer.publish(seal(author, _body(context, author, header)))
            expect_error(answer, *_CODES)


def _chain(context: Context, subject: Identity) -> list[Message]:
    """A chain of one signed statement by an unknown root (decision A-084)."""
    root = context.identity()
    statement = {
        "subject": subject.did,
        "issuer": root.did,
        "public_key": "0x" + subject.public_key.hex(),
        "valid_from": context.now() - 3600,
        "valid_until": context.now() + 3600,
    }
    statement["signature"] = "0x" + root.sign(canonical.encode(statement)).hex()
    certificate = base64.urlsafe_b64encode(canonical.encode(statement)).decode().rstrip("=")
    return [{"subject": subject.did, "issuer": root.did, "certificate": certificate}]


def _expect_refused(answer: Message, code: str, context: Context) -> None:
    """Expect an ERROR with this code if the relay announces our decisions, else with any of the four."""
    expect_error(answer, *([code] if context.subject.announces(DECISIONS) else _CODES))


def _manifest(context: Context, client_id: str, *keys: Identity, **changes: object) -> Message:
    now = context.now()
    return {
        "type": "CLIENT_MANIFEST",
        "client_id": client_id,
        "name": "conformance",
        "public_keys": [
            {
                "key_id": f"{client_id}#client-{number}",
                "public_key": "0x" + key.public_key.hex(),
                "valid_from": now - 60,
                "valid_until": now + 3600,
            }
            for number, key in enumerate(keys)
        ],
        **changes,
    }


@CHECKS("R-234", "R-235", source="RFC-0002 §11.3")
async def manifests_are_whole(context: Context) -> None:
    """A CLIENT_MANIFEST is by its client, and has a name and well-formed keys"""
    client, other = context.identity(), context.identity()
    good = _manifest(context, client.did, other)
    wrong: list[Message] = [
        {"client_id": other.did},
        {"name": ...},
        {"public_keys": ...},
        {"public_keys": [{}]},
        {"public_keys": [{**good["public_keys"][0], "public_key": "0x12"}]},
    ]
    async with context.connect() as peer:
        await peer.store(context.build(client, good))
        for change in wrong:
            content = {name: value for name, value in {**good, **change}.items() if value is not ...}
            answer = await peer.publish(context.build(client, content))
            if answer.get("code") != "invalid_schema":
                raise Failed(f"ERROR invalid_schema for {shorten(content)}", shorten(answer))


@CHECKS("R-232", "R-236", source="RFC-0002 §11.3, §11.5; decision A-079, A-080")
async def manifests_say_which_keys(context: Context) -> None:
    """A client's keys are those of its newest CLIENT_MANIFEST; its own key counts only while it has none"""
    author, client = context.identity(), context.identity()
    first, second = context.identity(), context.identity()

    async def origin(peer: Peer, key: Identity) -> object:
        claim = _attested(_body(context, author, _header("SOFTWARE")), client.did, key)
        return _origin(await _served(peer, author, seal(author, claim)))

    async with context.connect() as peer:
        expect_equal(await origin(peer, client), "SOFTWARE", "by its own key, without a manifest")
        await peer.store(context.build(client, _manifest(context, client.did, first)))
        expect_equal(await origin(peer, first), "SOFTWARE", "by the key of its manifest")
        expect_equal(await origin(peer, second), "UNKNOWN", "by a key not in its manifest")
        # Manifests of the same second are ordered by their ids, so the newer one waits for the next second.
        await asyncio.sleep(1.1)
        await peer.store(context.build(client, _manifest(context, client.did, second)))
        expect_equal(await origin(peer, second), "SOFTWARE", "by the key of its new manifest")
        expect_equal(await origin(peer, first), "UNKNOWN", "by a key of its old manifest alone")


@CHECKS("R-226", source="RFC-0002 §5; decision A-089", level=Keyword.SHOULD)
async def broken_histories_are_not_refused(context: Context) -> None:
    """A relay does not refuse a packet for a broken `edit_history`"""
    author, client = context.identity(), context.identity()
    edit = {
        "action": "CROP",
        "timestamp": context.now(),
        "prev_edit_hash": byte_hash(b"nothing"),
        "resulting_media_hash": byte_hash(b"else"),
        "signature": "0x" + "00" * 64,
    }
    body = _body(context, author, _header("SOFTWARE", edit_history=[edit]))
    async with context.connect() as peer:
        expect_ok(await peer.publish(seal(author, _attested(body, client.did, client))))
