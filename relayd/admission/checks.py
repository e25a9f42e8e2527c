"""The checks of a PUBLISH that need no database (relay.md §11, decision A-059).

     5 schema and canonical form ─ 6 size ─ 7 packet id    `Packet.parse`, in strata
     8 duplicate                                           the pipeline: memory, then the log
     9 policy ─ 10 freshness and expiry                    `weigh`, on the event loop
    11 keys and signature ─ 12 rules of the content type   `judge`, on a verify thread, by what was `Known`
    13 provenance                                          `trace`, on a verify thread too
    14 what is stored                                      `to_store`

The first failure decides the answer. Nothing here waits or keeps state, so that threads may run it.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.protocol.equivalence import equivalence_key
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import public_key_from_did
from strata.protocol.keys import IDENTITY_TYPES, KeyChain
from strata.protocol.packets import Packet, check_freshness, verify_signature
from strata.protocol.provenance import Downgrade, ProvenanceTrust
from strata.protocol.provenance import judge as judge_provenance
from strata.protocol.typed import check_content, has_checks

from relayd.admission.knowledge import Known
from relayd.admission.origin import PeerOrigin, check_age, check_asked
from relayd.policy import Policy
from relayd.store.types import EXEMPT_TYPES, NewPacket

__all__ = ["judge", "require_chain_room", "require_room", "to_store", "trace", "weigh"]

_CHAIN_PACKETS = 64
"""The longest chain, in packets of the largest size; usual packets are a thirtieth of that size."""


def require_room(packet: Packet, max_identity_bytes: int) -> None:
    """The size limit of packets that are kept forever and read whole (check 6). Raises `InvalidPacket`."""
    if packet.content_type in EXEMPT_TYPES and packet.size_bytes > max_identity_bytes:
        raise InvalidPacket(
            ErrorCode.PACKET_TOO_LARGE,
            f"a packet of type {packet.content_type} may have {max_identity_bytes} bytes",
            detail="identity_packet",
            max_bytes=max_identity_bytes,
        )


def require_chain_room(packet: Packet, known: Known, max_identity_bytes: int) -> None:
    """Refuse an identity packet for which its author's chain has no room. Raises `InvalidPacket`.

    A revocation may take twice the room: a thief of a key must not be able to prevent its revocation by
    filling the chain.
    """
    if known.chain is None or packet.content_type not in IDENTITY_TYPES:
        return
    room = _CHAIN_PACKETS * max_identity_bytes * (2 if packet.content.get("event") == "REVOKE" else 1)
    if packet.size_bytes + sum(event.size_bytes for event, _ in known.chain.events) > room:
        raise InvalidPacket(
            ErrorCode.POLICY_REJECTED,
            f"the DID's identity packets would exceed {room} bytes in all",
            detail="too_many_key_bytes",
        )


def weigh(
    packet: Packet,
    policy: Policy,
    now: int,
    *,
    max_age_seconds: int,
    origin: PeerOrigin | None = None,
    witness: int | None = None,
) -> None:
    """Checks 9 and 10. The policy for a packet of a peer is the same (R-379), and the peer must have been
    asked for it. Raises `InvalidPacket`."""
    policy.check(packet)
    if origin is None:
        check_freshness(packet, now, max_age_seconds=max_age_seconds)
    else:
        check_asked(packet, origin)
        check_age(packet, origin, witness, now, max_age_seconds=max_age_seconds)


def judge(packet: Packet, known: Known, now: int, *, ingest: bool = True) -> bool:
    """Checks 11 and 12. Returns whether the packet is valid but has no effect for now (R-088).

    With `ingest=False`, only what was known at `now`, a time in the past, counts: for a packet that another
    relay accepted then (R-370).

    Raises `InvalidPacket` for the first check that fails. A plain packet costs a signature check and little
    more.
    """
    queued = False
    if known.chain is None:
        key = public_key_from_did(packet.author_id)
        if key is None:
            raise InvalidPacket(
                ErrorCode.INVALID_SIGNATURE, "the author's key is not known here", detail="unresolved_key"
            )
        if not verify_signature(packet, key):
            raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "the signature does not verify")
    elif packet.content_type in IDENTITY_TYPES:
        queued = _change(packet, known.chain, now)
    else:
        known.chain.verify(packet, now, ingest=ingest)
        if ingest and now < known.chain.changed_at:  # by a clock that was ahead: no reader counts that yet
            known.chain.verify(packet, now, ingest=False)
    if has_checks(packet):
        check_content(packet, known.author_keys(packet.author_id, now))
    return queued


def trace(packet: Packet, known: Known, trust: ProvenanceTrust, now: int) -> Downgrade | None:
    """Check 13: the relay's finding, if it serves another origin than the claimed one (R-202 … R-237).

    Raises `InvalidPacket` for a claim that needs a proof and has none.
    """
    downgrade = judge_provenance(
        packet, now=now, trust=trust, keys_of=known.keys_of, manifest_of=known.manifests.get
    )
    # Its place is found once, here: the packet is then served by copying bytes, however often.
    return None if downgrade is None else downgrade.placed(packet.canonical)


def _change(packet: Packet, chain: KeyChain, now: int) -> bool:
    """Whether the change that this identity packet makes is pending; raises if the change is invalid."""
    changed = chain.apply(packet, now)
    if changed is chain:  # the chain has it, or a packet with its id: the signature must still be right
        chain.verify(packet, now)
    return changed.is_pending(packet.packet_id, now)


def to_store(
    packet: Packet, downgrade: Downgrade | None, origin: PeerOrigin | None = None, witness: int | None = None
) -> NewPacket:
    """The row of a packet that passed: its signed bytes, and beside them the relay's finding (R-208)."""
    return NewPacket(
        packet_id=packet.digest,
        author_id=packet.author_id,
        content_type=packet.content_type,
        timestamp=packet.timestamp,
        expires_at=packet.expires_at,
        body=packet.canonical,
        equivalence_key=equivalence_key(packet),
        annotation=None if downgrade is None else downgrade.encode(),
        witnessed_at=witness,
        ingest_peer=None if origin is None else origin.peer_id,
    )
