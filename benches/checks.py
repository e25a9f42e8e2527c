"""The cost of each check of a PUBLISH beside the signature check: in process, no socket, loop or database.

Costs are CPU microseconds of the cheapest slice of a loop over a check, with warm caches. Each includes the
call itself, about 0.05 us, so the parts add up to a little more than their cost together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec
from strata.protocol import ids, packets
from strata.protocol.documents import MAX_METHODS
from strata.protocol.equivalence import equivalence_key
from strata.protocol.ids import public_key_from_did
from strata.protocol.keys import KeyChain, KeyRules
from strata.protocol.packets import Packet, check_freshness, verify_signature
from strata.protocol.typed import check_content
from strata.protocol.wire import Publish, decode_client_message, encode

from benches.authors import (
    CLIENT,
    TRUST,
    chain_of,
    client_manifest,
    crowded_chain,
    of_model,
    of_software,
    of_unknown_origin,
)
from benches.load import AUTHORS, CONTENT_TYPE, sign
from benches.measures import Measure, Plan, Progress
from benches.peer import BenchError
from relayd.access.limits import Budget
from relayd.admission.checks import trace, weigh
from relayd.admission.knowledge import Known, known_of
from relayd.config import Settings
from relayd.identity.bootstrap import BootstrapContents
from relayd.identity.directory import Identities
from relayd.policy import Policy
from relayd.store.identities import AuthorsPage
from relayd.store.types import AbuseEntry, LogEntry, NewPacket, StoredPacket

__all__ = ["measure"]

_CHAIN_LENGTHS: Final = (1, 3, 50)
_LISTED: Final = 1000
"""Entries on each policy's list; none of them concerns a packet here, except on lists that allow."""
_SLICES: Final = 10
_MOST: Final = 2**31 - 1
_MAX_AGE_SECONDS: Final = 86_400

_T = TypeVar("_T")
_Cost = tuple[str, float]


def measure(plan: Plan, progress: Progress) -> list[Measure]:
    """The checks of a plain packet except the signature, together and alone, and those of special packets."""
    now, seconds = int(time.time()), plan.limit_seconds / 2
    plain = _Plain(now)
    signature = _cost(plain.signature, plain.packets, seconds)
    together = _cost(plain.all_but_signature, plain.messages, seconds)
    progress(f"checks: {together:.1f} us beside the signature's {signature:.1f}")
    parts = plain.parts(seconds)
    others = _policy(plain, seconds) + _keys(plain, seconds) + _chains(now, seconds) + _origins(now, seconds)
    headline = Measure(
        "checks",
        "all but the signature, plain packet",
        together,
        "us",
        signature,
        at_most=True,
        limit=signature,
        limit_name="one signature check",
        details={"us of a plain packet": {"signature": signature, **dict(parts)}},
    )
    return [headline] + [
        Measure("checks", name, cost, "us", limit=signature, limit_name="one signature check")
        for name, cost in [*parts, *others]
    ]


def _cost(check: Callable[[_T], object], inputs: Sequence[_T], seconds: float) -> float:
    """CPU microseconds of one call, in the cheapest slice; other work on the machine makes calls costlier."""
    return min(_slice(check, inputs, seconds / _SLICES) for _ in range(_SLICES)) * 1e6


def _slice(check: Callable[[_T], object], inputs: Sequence[_T], seconds: float) -> float:
    calls, started = 0, time.thread_time()
    while (used := time.thread_time() - started) < seconds:
        for item in inputs:
            check(item)
        calls += len(inputs)
    return used / calls


class _NoLog:
    """A log without identity packets."""

    async def authors(self, type_: str, after: int = 0) -> AuthorsPage:
        return AuthorsPage(set(), None)

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], **_: object
    ) -> list[StoredPacket]:
        return []


class _Plain:
    """Packets of the usual size by authors without key chains, and a relay's checks of them."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.packets = sign(0, AUTHORS)
        self.messages = [encode(Publish(packet=msgspec.Raw(packet.canonical))) for packet in self.packets]
        self.identities = Identities(_NoLog(), BootstrapContents(), KeyRules())
        self._policy = Policy()
        self._budget = Budget(_MOST, 60)
        self._known = Known(self.identities.generation)

    def signature(self, packet: Packet) -> None:
        """The check with which all others are compared."""
        _require(verify_signature(packet, self._key(packet)))

    def all_but_signature(self, message: bytes) -> None:
        """All checks of a PUBLISH from its frame to the writer, except the signature check."""
        raw = self._raw(message)
        self._budget.take(0.0)
        packet = self._parsed(raw)
        weigh(packet, self._policy, self.now, max_age_seconds=_MAX_AGE_SECONDS)
        key = self._looked_up(packet)
        check_content(packet, (key,))
        trace(packet, self._known, TRUST, self.now)
        equivalence_key(packet)

    def parts(self, seconds: float) -> list[_Cost]:
        """The cost of each of these checks."""
        keys = {packet.packet_id: (self._key(packet),) for packet in self.packets}
        checks: list[tuple[str, Callable[[Packet], object]]] = [
            ("rate limit", lambda packet: self._budget.take(0.0)),
            ("policy, nothing listed", self._policy.check),
            (
                "freshness",
                lambda packet: check_freshness(packet, self.now, max_age_seconds=_MAX_AGE_SECONDS),
            ),
            ("key of a plain author", self._looked_up),
            ("rules of its type, a POST", lambda packet: check_content(packet, keys[packet.packet_id])),
            ("provenance, no header", lambda packet: trace(packet, self._known, TRUST, self.now)),
            ("equivalence key, a POST", equivalence_key),
        ]
        raws = [packet.canonical for packet in self.packets]
        return [
            ("message decoded", _cost(self._raw, self.messages, seconds)),
            ("schema, canonical form, size, id", _cost(self._parsed, raws, seconds)),
            *((name, _cost(check, self.packets, seconds)) for name, check in checks),
        ]

    def _raw(self, message: bytes) -> bytes:
        publish = decode_client_message(message)
        assert isinstance(publish, Publish)
        return bytes(publish.packet)

    def _parsed(self, raw: bytes) -> Packet:
        return Packet.parse(raw, max_bytes=262_144, max_depth=64)

    def _looked_up(self, packet: Packet) -> bytes:
        _require(known_of(packet, self.identities, 0, self._known) is self._known)
        return self._key(packet)

    def _key(self, packet: Packet) -> bytes:
        key = public_key_from_did(packet.author_id)
        assert key is not None
        return key


def _policy(plain: _Plain, seconds: float) -> list[_Cost]:
    """The policy check with every list full; the lists that allow allow the packet."""
    dids = tuple(f"did:strata:stranger-{number}" for number in range(_LISTED))
    hashes = tuple(f"0x{number:064x}" for number in range(_LISTED))
    types = tuple(f"TYPE_{number}" for number in range(_LISTED))
    settings = Settings(
        blocked_authors=dids,
        blocked_packet_ids=hashes,
        blocked_media_hashes=hashes,
        blocked_types=types,
        allowed_authors=(*dids, *(packet.author_id for packet in plain.packets)),
        allowed_types=(*types, CONTENT_TYPE),
    )
    policy = Policy.from_settings(settings, [AbuseEntry(did, "block", "", None) for did in dids])
    return [(f"policy, {_LISTED} on every list", _cost(policy.check, plain.packets, seconds))]


def _keys(plain: _Plain, seconds: float) -> list[_Cost]:
    """Key look-ups other than the usual one."""
    dids = [packet.author_id for packet in plain.packets]

    def unseen(did: str) -> None:
        _require(ids._has_form.__wrapped__(did) and public_key_from_did.__wrapped__(did) is not None)

    chain, packet = chain_of(1, plain.now)
    identities = plain.identities
    identities.observe([_entry(event, at, number) for number, (event, at) in enumerate(chain.events, 1)])

    def known(packet: Packet) -> None:
        author = packet.author_id
        _require(not identities.is_plain(author) and not identities.missing((author,)))
        Known(identities.generation, chain=identities.chain(author))

    return [
        ("key of a plain author, first seen", _cost(unseen, dids, seconds)),
        ("key chain of an author, in memory", _cost(known, [packet], seconds)),
    ]


def _entry(event: Packet, received_at: int, sequence: int) -> LogEntry:
    row = NewPacket(
        packet_id=event.digest,
        author_id=event.author_id,
        content_type=event.content_type,
        timestamp=event.timestamp,
        expires_at=event.expires_at,
        body=event.canonical,
    )
    return LogEntry(sequence, received_at, row)


def _chains(now: int, seconds: float) -> list[_Cost]:
    """`KeyChain.verify`, including its signature check."""
    rows = [(f"signature, chain of {length}", chain_of(length, now)) for length in _CHAIN_LENGTHS]
    rows.append((f"signature, oldest of {MAX_METHODS} live keys", crowded_chain(MAX_METHODS, now)))

    def judged(chain: KeyChain) -> Callable[[Packet], None]:
        def check(packet: Packet) -> None:
            packets._verify_small.cache_clear()  # as for a publish, which was never verified before
            chain.verify(packet, now)

        return check

    return [(name, _cost(judged(chain), [packet], seconds)) for name, (chain, packet) in rows]


def _origins(now: int, seconds: float) -> list[_Cost]:
    """The provenance check of packets that claim an origin; every proof is valid."""
    plain, known = Known(0), Known(0, manifests={CLIENT.did: client_manifest(now)})
    rows = [
        ("provenance, header UNKNOWN", of_unknown_origin(now), plain),
        ("provenance, attested SOFTWARE", of_software(now), plain),
        ("provenance, the same by a manifest", of_software(now), known),
        ("provenance, AI_MODEL, chain of 2", of_model(now), plain),
    ]

    def traced(known: Known) -> Callable[[Packet], None]:
        return lambda packet: _require(trace(packet, known, TRUST, now) is None)

    return [(name, _cost(traced(known), [packet], seconds)) for name, packet, known in rows]


def _require(holds: bool) -> None:
    if not holds:
        raise BenchError("a check came to another verdict than it should")
