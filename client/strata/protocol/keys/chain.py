"""`KeyChain`: the identity packets of one author as an immutable value that answers questions about keys."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from strata.protocol import ids
from strata.protocol.documents import DidDocument
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys.entries import Entry, in_seconds, read_entries
from strata.protocol.keys.ledger import KeyLedger, conflict_refusal
from strata.protocol.keys.statements import IDENTITY_TYPES, PublishedDocument
from strata.protocol.keys.states import KeyRules, KeyStanding, KeyState, Use, explain, newest_first, refused
from strata.protocol.packets import Packet, verify_shared

__all__ = ["KeyChain"]

_MAX_WINDOWS = 4
"""How many spans of time are cached; a reader of history moves on from one to the next."""

_BEFORE_ALL = float("-inf")
_STEP = 64
"""A past state is kept for every 64 packets, and besides them the last one requested."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The keys that may sign from `since` until before `until`."""

    since: float
    until: float
    keys: tuple[bytes, ...]


_Mark = tuple[float, KeyLedger]
"""A second, and the state after the packets that were received by then."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """The state that counts from `since` until before `until`, unless a packet arrives."""

    since: float
    until: float
    ledger: KeyLedger


class KeyChain:
    """Everything known about the keys of one DID. Immutable; threads may share it.

    `events` are the valid packets, each with the second in which it was received, in the order in which they
    count. `genesis` and `replay` make a chain; `apply` makes the next one.
    """

    __slots__ = (
        "_before",
        "_cache",
        "_genesis",
        "_held",
        "_ledger",
        "_past",
        "_second",
        "_settled",
        "did",
        "rules",
    )

    def __init__(
        self,
        genesis: KeyLedger,
        before: KeyLedger,
        ledger: KeyLedger,
        held: tuple[Entry, ...],
        second: tuple[Entry, ...],
    ) -> None:
        self.did = genesis.did
        self.rules = genesis.rules
        self._genesis = genesis
        self._before = before  # the state before the last second
        self._ledger = ledger  # the state after it
        self._held = held
        self._second = second  # all packets considered in the last second, valid or not
        self._cache: dict[tuple[Use, bool], tuple[_Window, ...]] = {}
        self._past: tuple[tuple[_Mark, ...], _Mark] = (), (_BEFORE_ALL, genesis)
        self._settled: _Settled | None = None
        """The last one requested: an event that waits for approvals indefinitely is not judged each time."""

    @classmethod
    def genesis(
        cls,
        did: str,
        *,
        documents: Sequence[DidDocument] = (),
        static_key: bytes | None = None,
        rules: KeyRules | None = None,
    ) -> KeyChain:
        """The chain of a DID before any packet of its own (R-056).

        `documents` and `static_key` come from configuration or bootstrap and are trusted. With neither, a
        self-certifying DID has its own key (R-060); any other DID has none, and none of its signatures count
        (R-047). Raises `InvalidPacket` for another DID's document and `IdentityError` if `did` is not a DID.
        """
        ledger = KeyLedger.begin(did, documents, static_key, rules or KeyRules())
        return cls(ledger, ledger, ledger, (), ())

    @classmethod
    def replay(
        cls,
        did: str,
        events: Iterable[tuple[Packet, int]],
        *,
        documents: Sequence[DidDocument] = (),
        static_key: bytes | None = None,
        rules: KeyRules | None = None,
    ) -> KeyChain:
        """The chain of packets that were received earlier, each with its `received_at` (R-074).

        They may be in any order, and repeated. A packet that is not valid is left out, since anyone may have
        sent it to the relay or reader.
        """
        chain = cls.genesis(did, documents=documents, static_key=static_key, rules=rules)
        return chain._replayed(read_entries(did, events))[0]

    @property
    def events(self) -> tuple[tuple[Packet, int], ...]:
        """The packets of the chain with the seconds in which they were received."""
        return tuple((entry.packet, entry.received_at) for entry in self._held)

    @property
    def documents(self) -> tuple[DidDocument, ...]:
        """The known documents, each the successor of the previous one; rivals come last."""
        return self._ledger.documents

    @property
    def head(self) -> DidDocument | None:
        """The current document; None if no document is known or several claim to be it."""
        return self._ledger.head

    @property
    def conflict(self) -> str | None:
        """Why no key resolves any more (R-054), as text for people; None without a conflict."""
        return self._ledger.conflict

    @property
    def is_resolvable(self) -> bool:
        """Whether any key is known at all."""
        return bool(self._ledger.keys)

    @property
    def changed_at(self) -> int:
        """The second in which the last packet was received; -1 without packets."""
        return self._last

    def apply(self, packet: Packet, received_at: int) -> KeyChain:
        """The chain with one more identity packet.

        The packet may be older than the last one (a reader's second relay may have seen it first). A packet
        received in the same second as others is placed among them by the rule of R-074, regardless of the
        order of arrival, and can displace one of them. A packet with the id of one in the chain changes
        nothing. Raises `InvalidPacket` if the packet is not valid, or with `policy_rejected` (detail
        `too_many_key_events`) if there is no room for it.
        """
        _require_author(self.did, packet)
        if any(entry.packet_id == packet.packet_id for entry in self._held):
            return self
        entry = Entry(packet, received_at)
        if received_at > self._last:
            return KeyChain(self._genesis, self._ledger, self._admit(entry), (*self._held, entry), (entry,))
        if received_at == self._last:
            # The packet must be valid in both orders: in order of arrival, a revoked key signs nothing more.
            self._admit(entry)
        chain, refusals = self._replayed({*self._held, *self._second, entry}, since=received_at)
        if (refusal := refusals.get(packet.packet_id)) is not None:
            raise refusal
        return chain

    def candidates(self, at: int, use: Use = Use.PACKET) -> tuple[bytes, ...]:
        """The public keys that may sign at `at`, newest first (R-066); empty in a conflict (R-054)."""
        return self._window(at, use, ingest=True).keys

    def holds_until(self, at: int, use: Use = Use.PACKET) -> float:
        """The second from which `candidates` may differ from those at `at` even if no packet arrives."""
        return self._window(at, use, ingest=True).until

    def verify(self, packet: Packet, at: int, *, ingest: bool = True) -> None:
        """Check that the packet's signature counts, if received at `at`.

        `ingest=False` is for a reader of a packet received in the past: only what was known then counts. For
        an identity packet, this makes all the checks of `apply`.

        Raises `InvalidPacket`: `invalid_signature` (details `unresolved_key`, `document_conflict`,
        `recovery_key_not_allowed`, `key_use_not_allowed`, …), `key_expired`, `key_revoked`,
        `key_not_yet_valid` (R-067), and `invalid_schema` for the members of an identity packet.
        """
        _require_author(self.did, packet)
        if packet.content_type in IDENTITY_TYPES:
            self._verify_identity_packet(packet, at, ingest=ingest)
            return

        def signed_by(public_key: bytes) -> bool:
            return verify_shared(packet, public_key)

        self._verify(signed_by, at, Use.PACKET, ingest=ingest)

    def verify_auth(self, message: bytes, signature: bytes, at: int) -> bytes:
        """Check an AUTH signature over `message`, made now; return the public key that verifies it.

        Raises `InvalidPacket`, always with `invalid_signature`; the detail gives the reason (R-277, R-281).
        """
        proved = b""

        def signed_by(public_key: bytes) -> bool:
            nonlocal proved
            proved = public_key
            return ids.verify(public_key, message, signature)

        self._verify(signed_by, at, Use.AUTH, ingest=True)
        return proved

    def check_auth_key(self, public_key: bytes, at: int) -> None:
        """Raise as `verify_auth` does, unless an AUTH by this key would pass at `at`."""
        self._verify(public_key.__eq__, at, Use.AUTH, ingest=True)

    def is_pending(self, packet_id: str, at: int) -> bool:
        """Whether this event is waiting for approvals or for its delay to pass (R-084…R-088)."""
        return packet_id in self.pending(at)

    def pending(self, at: int) -> frozenset[str]:
        """The ids of all pending events."""
        return self._state_at(at, ingest=True).pending

    def keys(self, at: int) -> tuple[KeyState, ...]:
        """The state of every key of the chain at `at`, in order of introduction; for people and `/did/`."""
        return tuple(self._state_at(at, ingest=True).keys.values())

    def __repr__(self) -> str:
        return f"KeyChain({self.did}, {len(self._held)} events)"

    # Replaying

    @property
    def _last(self) -> int:
        """The second in which the last packet was received."""
        return self._second[-1].received_at if self._second else -1

    def _admit(self, entry: Entry) -> KeyLedger:
        """The state after one more packet, if that packet is the last. Raises `InvalidPacket`."""
        ledger = self._state_at(entry.received_at, ingest=True).copy()
        ledger.receive(entry)
        return ledger

    def _replayed(self, entries: Iterable[Entry], *, since: int = 0) -> tuple[KeyChain, _Refusals]:
        """A chain with the same beginning and these packets, and why some of them are not valid.

        Those received before `since` are known to be valid; if `since` is the last second, they are not
        checked again.
        """
        before = ledger = self._genesis
        held: list[Entry] = []
        if since == self._last:
            before = ledger = self._before
            held = [entry for entry in self._held if entry.received_at < since]
            entries = [entry for entry in entries if entry.received_at >= since]
        ids_held = {entry.packet_id for entry in held}
        second: list[Entry] = []
        refusals: _Refusals = {}
        for second in in_seconds(entries):
            before = ledger
            second = [entry for entry in second if entry.packet_id not in ids_held]
            ledger, holding, refused_here = _receive_second(before, second)
            held += holding
            ids_held.update(entry.packet_id for entry in holding)
            refusals |= refused_here
        return KeyChain(self._genesis, before, ledger, tuple(held), tuple(second)), refusals

    def _state_at(self, at: int, *, ingest: bool) -> KeyLedger:
        """The state that counts at `at`. For a reader, later packets are not known yet."""
        ledger = self._ledger
        if at < self._last:
            if ingest:
                at = self._last  # packets that were applied count even if a clock was set back
            else:
                ledger = self._past_state(at)
        if ledger is not self._ledger:
            return _settled(ledger, at).ledger
        known = self._settled
        if known is None or not known.since <= at < known.until:
            known = self._settled = _settled(ledger, at)
        return known.ledger

    def _past_state(self, at: int) -> KeyLedger:
        """The state after the packets that were received by `at`.

        It is computed from the latest state in the cache: a reader of history asks for one moment after
        another, and replaying a long chain for each of them would be too expensive.
        """
        marks, last = self._past
        since, ledger = _BEFORE_ALL, self._genesis
        for known in (*marks, last):
            if since < known[0] <= at:
                since, ledger = known
        count, marked = 0, marks[-1][0] if marks else _BEFORE_ALL
        for second in in_seconds(entry for entry in self._held if since < entry.received_at <= at):
            since, ledger = second[0].received_at, _receive_second(ledger, second)[0]
            count += len(second)
            if count >= _STEP and since > marked:
                marks, count = (*marks, (since, ledger)), 0
        self._past = marks, (since, ledger)
        return ledger

    # Judging

    def _window(self, at: int, use: Use, *, ingest: bool) -> _Window:
        windows = self._cache.get((use, ingest), ())
        for window in windows:
            if window.since <= at < window.until:
                return window
        window = self._make_window(at, use, ingest=ingest)
        self._cache[use, ingest] = (window, *windows[: _MAX_WINDOWS - 1])
        return window

    def _make_window(self, at: int, use: Use, *, ingest: bool) -> _Window:
        state = self._state_at(at, ingest=ingest)
        skew = self.rules.clock_skew_seconds
        edges = [edge for key in state.keys.values() for edge in key.edges(skew)]
        for entry in self._held:
            edges += (entry.received_at, entry.received_at + self.rules.recovery_delay_seconds)
        keys: tuple[bytes, ...] = ()
        if state.conflict is None:
            keys = tuple(
                key.public_key
                for key in newest_first(state.keys.values())
                if key.may(use) and key.standing(at, skew) is KeyStanding.VALID
            )
        return _Window(
            max((edge for edge in edges if edge <= at), default=float("-inf")),
            min((edge for edge in edges if edge > at), default=float("inf")),
            keys,
        )

    def _verify(self, signed_by: Callable[[bytes], bool], at: int, use: Use, *, ingest: bool) -> None:
        if any(map(signed_by, self._window(at, use, ingest=ingest).keys)):
            return
        if not ingest and any(map(signed_by, self._keys_within(at, use))):
            return
        state = self._state_at(at, ingest=ingest)
        if state.conflict is not None:
            raise conflict_refusal()
        if not state.keys:
            raise refused("the author's key is not known here", "unresolved_key")
        raise explain(state.keys.values(), at, self.rules.clock_skew_seconds, use, signed_by)

    def _keys_within(self, at: int, use: Use) -> Iterator[bytes]:
        """The keys that could sign at any moment of a second in which packets of the chain were received.

        Such a second is not one moment: the packet in question may have come before, between or after them.
        """
        within = [entry for entry in self._held if entry.received_at == at]
        if not within:
            return
        ledger = self._past_state(at - 1).copy()
        ledger.settle(at)
        skew = self.rules.clock_skew_seconds
        for entry in within:
            if ledger.conflict is None:
                for key in newest_first(ledger.keys.values()):
                    if key.may(use) and key.standing(at, skew) is KeyStanding.VALID:
                        yield key.public_key
            ledger.receive(entry)

    def _verify_identity_packet(self, packet: Packet, at: int, *, ingest: bool) -> None:
        if any(entry.packet == packet for entry in self._held):
            return
        if ingest:
            self._admit(Entry(packet, max(at, self._last)))
            return
        known = [e for e in self._held if e.received_at <= at and e.packet_id != packet.packet_id]
        _, refusals = self._replayed([*known, Entry(packet, at)])
        if (refusal := refusals.get(packet.packet_id)) is not None:
            raise refusal


def _settled(ledger: KeyLedger, at: int) -> _Settled:
    """The state as of `at`, with pending events applied. Due events that lack approvals stay pending."""
    if ledger.has_due(at):
        ledger = ledger.copy()
        ledger.settle(at)
    due_at = ledger.next_due_after(at)
    return _Settled(at, float("inf") if due_at is None else due_at, ledger)


_Refusals = dict[str, InvalidPacket]
"""Why packets are not valid, by packet id."""


def _receive_second(before: KeyLedger, entries: Iterable[Entry]) -> tuple[KeyLedger, list[Entry], _Refusals]:
    """The state after the packets of one second, the valid ones in their order, and why others are not valid.

    R-074: the next is the valid packet with the smallest id, but documents come before events: a document
    refers to the existing keys, and must not remove an unlisted one by the chance of an id. A packet that is
    not valid yet may be valid after another, for instance the one that introduces its signing key, so after
    each packet all the waiting ones are tried again. Of two with the same id and different signatures, only
    one counts.
    """
    ledger = before.copy()
    waiting = sorted(entries, key=_precedence)
    held: list[Entry] = []
    refusals: _Refusals = {}
    while waiting:
        for entry in waiting:
            try:
                ledger.receive(entry)
            except InvalidPacket as refusal:
                refusals[entry.packet_id] = refusal
            else:
                held.append(entry)
                waiting = [other for other in waiting if other.packet_id != entry.packet_id]
                refusals.pop(entry.packet_id, None)
                break
        else:
            break
    return ledger, held, refusals


def _precedence(entry: Entry) -> tuple[bool, str, bytes]:
    is_document = isinstance(entry.statement, PublishedDocument)
    return not is_document, entry.packet_id, entry.packet.signature_bytes


def _require_author(did: str, packet: Packet) -> None:
    if packet.author_id != did:
        raise ValueError(f"the chain is that of {did}, not of {packet.author_id}")
