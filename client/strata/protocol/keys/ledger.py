"""The running state of a chain: keys, documents and pending recovery, updated packet by packet.

`KeyLedger` is the only mutable value in this package. A chain copies its ledger before updating it, and never
shares a ledger that is being updated. `receive` judges a packet completely before it changes anything, so a
refused packet has only one effect: the state advances to its time.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from strata.protocol import ids
from strata.protocol.documents import MAX_METHODS, DidDocument, method_id, spelled_key
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys.entries import Entry
from strata.protocol.keys.recovery import Electors, PendingEvent
from strata.protocol.keys.roles import earlier, under_document
from strata.protocol.keys.statements import KeyEvent, PublishedDocument, RecoveryApproval
from strata.protocol.keys.states import KeyRules, KeyStanding, KeyState, Use, explain, newest_first, refused
from strata.protocol.members import refuse

__all__ = ["MAX_CHAIN_EVENTS", "MAX_CHAIN_EVENTS_A_SECOND", "KeyLedger", "conflict_refusal"]

MAX_CHAIN_EVENTS = 1024
"""The most valid identity packets of one DID. Beyond that, each key can still be revoked, once."""

MAX_CHAIN_EVENTS_A_SECOND = 32
"""The same for the packets of one second: their order is computed again whenever one of them arrives."""

_EFFECTIVE = frozenset({"ADD", "ROTATE", "REVOKE"})
"""The events that have an effect; others are kept without one (R-071)."""


class KeyLedger:
    """Everything known about one DID after some packets have been received."""

    __slots__ = (
        "_at",
        "_count",
        "_count_in_second",
        "_events",
        "_pending",
        "_superseded",
        "conflict",
        "did",
        "documents",
        "keys",
        "rules",
    )

    def __init__(self, did: str, rules: KeyRules) -> None:
        self.did = did
        self.rules = rules
        self.keys: dict[bytes, KeyState] = {}
        """By public key, in order of introduction."""
        self.documents: tuple[DidDocument, ...] = ()
        """Each succeeds the previous one; in a conflict the last ones are rivals."""
        self.conflict: str | None = None
        """Why no key resolves any more (R-054), or None."""
        self._superseded: frozenset[str] = frozenset()  # hashes of documents that have a successor
        self._pending: dict[str, PendingEvent] = {}  # by packet id
        self._events: frozenset[str] = frozenset()  # packet ids of the KEY_EVENTs an approval may name
        self._at = 0  # the second in which the last packet was received
        self._count = 0
        self._count_in_second = 0

    @classmethod
    def begin(
        cls, did: str, documents: Iterable[DidDocument], static_key: bytes | None, rules: KeyRules
    ) -> KeyLedger:
        """The initial state: from documents, else a configured key, else the DID's own key (R-056, R-060)."""
        ledger = cls(did, rules)
        ledger._begin_with(documents)
        if not ledger.documents:
            key = static_key or ids.public_key_from_did(did)
            if key is not None:
                ledger.keys[key] = KeyState(method_id(did), key, valid_from=0)
        return ledger

    def copy(self) -> KeyLedger:
        """An equal ledger that can be updated independently."""
        twin = KeyLedger(self.did, self.rules)
        twin.keys = dict(self.keys)
        twin.documents = self.documents
        twin.conflict = self.conflict
        twin._superseded = self._superseded
        twin._pending = dict(self._pending)
        twin._events = self._events
        twin._at = self._at
        twin._count = self._count
        twin._count_in_second = self._count_in_second
        return twin

    @property
    def head(self) -> DidDocument | None:
        """The newest document; None if no document is known or there is a conflict."""
        return self.documents[-1] if self.documents and self.conflict is None else None

    @property
    def pending(self) -> frozenset[str]:
        """The ids of the events that have not yet taken effect."""
        return frozenset(self._pending)

    def next_due_after(self, at: int) -> int | None:
        """When the next pending event that is not due at `at` becomes due; None without one."""
        return min((due for pending in self._pending.values() if (due := pending.due_at) > at), default=None)

    def has_due(self, at: int) -> bool:
        """Whether a pending event is due at `at`."""
        return any(pending.due_at <= at for pending in self._pending.values())

    def named(self, key_id: str) -> KeyState | None:
        """The key with this id; `<did>#<multibase>` always names the key that it spells (R-060)."""
        for key in self.keys.values():
            if key.key_id == key_id:
                return key
        public_key = spelled_key(key_id)
        return None if public_key is None else self.keys.get(public_key)

    def receive(self, entry: Entry) -> None:
        """Apply one packet, received no earlier than the last one.

        Raises `InvalidPacket` if the packet is not valid; then the state has only advanced to its time.
        """
        at = entry.received_at
        self.settle(at)
        if self.conflict is not None:
            raise conflict_refusal()
        self._require_room(entry)
        signer = self._signer(entry)
        match entry.statement:
            case KeyEvent() as event:
                if signer.recovery:
                    self._propose(entry.packet_id, event, signer, at)
                else:
                    self._decide(entry.packet_id, event, signer, at)
                self._events |= {entry.packet_id}
            case RecoveryApproval() as approval:
                self._approve(approval, signer, at)
            case PublishedDocument() as published:
                self._publish(entry.packet_id, published.document, at)
        self._count_in_second = self._count_in_second + 1 if at == self._at else 1
        self._count += 1
        self._at = at
        self.settle(at)

    def settle(self, until: int) -> None:
        """Apply the pending events that are due by `until` and have their approvals.

        Each is judged as of the moment it became due, or of the last packet, whichever is later. Only at
        these moments can its approvals become complete: as time passes, approvals can only be lost.
        """
        due = [pending for pending in self._pending.values() if pending.due_at <= until]
        electors: Electors | None = None
        for pending in sorted(due, key=lambda one: (one.due_at, one.packet_id)):
            if electors is None:
                electors = self._electors()
            moment = max(pending.due_at, self._at)
            if pending.is_approved(electors.at(moment)):
                del self._pending[pending.packet_id]
                self._fulfil(pending, moment)
                electors = None

    # Who may sign

    def _require_room(self, entry: Entry) -> None:
        in_second = self._count_in_second if entry.received_at == self._at else 0
        if self._count < MAX_CHAIN_EVENTS and in_second < MAX_CHAIN_EVENTS_A_SECOND:
            return
        statement = entry.statement
        if isinstance(statement, KeyEvent) and statement.event == "REVOKE":
            key = self.named(statement.key_id)
            if key is not None and key.revoked_at is None:
                return  # a thief of a key must not be able to prevent its revocation by filling the chain
        raise _policy_refusal("the DID has too many identity packets", "too_many_key_events")

    def _signer(self, entry: Entry) -> KeyState:
        """The key that signed, if it is valid in that second and may sign such a packet (R-062, R-068).

        Raises `InvalidPacket` otherwise.
        """
        at, skew = entry.received_at, self.rules.clock_skew_seconds
        recovery_too = not isinstance(entry.statement, PublishedDocument)
        for key in newest_first(self.keys.values()):
            if key.standing(at, skew) is KeyStanding.VALID and (
                key.may(Use.PACKET) or (key.recovery and recovery_too)
            ):
                if entry.is_signed_by(key.public_key):
                    return key
        if not self.keys:
            raise refused("the author's key is not known here", "unresolved_key")
        raise explain(self.keys.values(), at, skew, Use.PACKET, entry.is_signed_by)

    # KEY_EVENT

    def _decide(self, packet_id: str, event: KeyEvent, signer: KeyState, at: int) -> None:
        """Apply an event by a signing key: it takes effect at once, and overrides pending events (R-086)."""
        _require_begun(signer, at)
        overridden = self._overridden_by(event)
        is_veto = event.event == "REVOKE" and bool(overridden) and self.named(event.key_id) is None
        if not is_veto:
            self._check_names(event)
            self._require_key_room(event, MAX_METHODS, at)
        for pending in overridden:
            self._drop(pending)
        if not is_veto:
            self._take_effect(event, packet_id)

    def _propose(self, packet_id: str, event: KeyEvent, signer: KeyState, at: int) -> None:
        """Keep an event by a recovery key, to wait for its delay and its approvals (R-084, R-086)."""
        _require_begun(signer, at)
        self._require_policy(at)
        self._check_names(event)
        if event.event in _EFFECTIVE:
            due_at = at + self.rules.recovery_delay_seconds
            approved_by = frozenset({signer.public_key})
            self._pending[packet_id] = PendingEvent(packet_id, event, signer.public_key, due_at, approved_by)

    def _fulfil(self, pending: PendingEvent, at: int) -> None:
        """Apply a pending event, unless the id or key that it introduces has been used in the meantime."""
        try:
            self._check_names(pending.event)
            # Twice the room: a thief of a key must not be able to use up the room that recovery needs.
            self._require_key_room(pending.event, 2 * MAX_METHODS, at)
        except InvalidPacket:
            self._events -= {pending.packet_id}
        else:
            self._take_effect(pending.event, pending.packet_id)

    def _check_names(self, event: KeyEvent) -> None:
        """Refuse an event that names keys which it cannot name (R-071). No key and no id is used twice."""
        if event.event == "REVOKE" and self.named(event.key_id) is None:
            refuse("key_id names no key of this DID", "unknown_key")
        if event.public_key is None:
            return
        if event.public_key in self.keys or any(k.key_id == event.key_id for k in self.keys.values()):
            refuse("the key or its id is in the chain already", "key_known")
        if event.replaces is not None and self.named(event.replaces) is None:
            refuse("replaces names no key of this DID", "unknown_key")

    def _require_key_room(self, event: KeyEvent, most: int, at: int) -> None:
        skew = self.rules.clock_skew_seconds
        signing = sum(not key.recovery and not key.is_over(at, skew) for key in self.keys.values())
        if event.public_key is not None and signing >= most:
            raise _policy_refusal("the DID has too many live keys", "too_many_keys")

    def _take_effect(self, event: KeyEvent, packet_id: str) -> None:
        if event.event == "REVOKE" and (key := self.named(event.key_id)) is not None:
            revoked_at = earlier(key.revoked_at, event.revoked_at)  # a revocation is never undone
            self.keys[key.public_key] = replace(key, revoked_at=revoked_at)
        if event.public_key is None or event.valid_from is None:
            return
        authentication = assertion = True
        if event.replaces is not None and (old := self.named(event.replaces)) is not None:
            if not old.recovery:  # the new key takes over the role of the old one
                authentication, assertion = old.authentication, old.assertion
            valid_until = earlier(old.valid_until, event.valid_from)
            self.keys[old.public_key] = replace(old, valid_until=valid_until)
        self.keys[event.public_key] = KeyState(
            event.key_id,
            event.public_key,
            event.valid_from,
            event.valid_until,
            authentication=authentication,
            assertion=assertion,
            introduced_by=packet_id,
        )

    # Recovery

    def _approve(self, approval: RecoveryApproval, signer: KeyState, at: int) -> None:
        """Apply an approval (R-081). By itself it changes no key (R-083)."""
        if not signer.recovery:
            raise refused("an approval is signed by a recovery key", "recovery_key_required")
        self._require_policy(at)
        if signer.public_key not in self._electors().at(at).eligible:
            raise refused("this recovery key has no say in the policy", "recovery_key_not_eligible")
        if approval.target_event not in self._events:
            refuse("target_event names no valid KEY_EVENT of this DID", "unknown_target")
        pending = self._pending.get(approval.target_event)
        if pending is not None:
            self._pending[pending.packet_id] = pending.approve(signer.public_key)

    def _electors(self) -> Electors:
        policy = self.documents[-1].recovery_policy if self.documents else None
        return Electors(self.keys.values(), policy)

    def _require_policy(self, at: int) -> None:
        if self._electors().at(at).needed is None:
            raise refused("the document's recovery policy cannot be met", "recovery_policy_invalid")

    def _overridden_by(self, event: KeyEvent) -> list[PendingEvent]:
        """The pending events that name a key which this event also names (A-030)."""
        if event.event not in _EFFECTIVE:
            return []
        named = self._names(event)
        return [pending for pending in self._pending.values() if named & self._names(pending.event)]

    def _names(self, event: KeyEvent) -> set[bytes | str]:
        """The keys that an event names: by id, and by public key if that is known."""
        names: set[bytes | str] = set()
        for key_id in (event.key_id, event.replaces):
            if key_id is not None:
                known = self.named(key_id)
                spelled = spelled_key(key_id) if known is None else known.public_key
                names |= {key_id} if spelled is None else {key_id, spelled}
        if event.public_key is not None:
            names.add(event.public_key)
        return names

    def _drop(self, pending: PendingEvent) -> None:
        del self._pending[pending.packet_id]
        self._events -= {pending.packet_id}

    # Documents

    def _begin_with(self, documents: Iterable[DidDocument]) -> None:
        """Take over configured documents, in the order of their links, which is not that of the argument."""
        waiting = {document.hash: document for document in documents}
        if any(document.did != self.did for document in waiting.values()):
            refuse("a configured document is another DID's")
        while waiting:
            # The document whose predecessor is not among them begins the chain: an operator vouches for it.
            head = self.head
            following = [
                document
                for document in waiting.values()
                if (document.prev_hash not in waiting if head is None else document.prev_hash == head.hash)
            ]
            if len(following) != 1:
                self.documents += tuple(waiting.values())
                self.conflict = "the configured documents do not form one chain"
                return
            del waiting[following[0].hash]
            self._become_head(following[0], introduced_by=None)

    def _publish(self, packet_id: str, document: DidDocument, at: int) -> None:
        """Apply a published document: the first one, or a successor of the head (R-053, decision 7)."""
        head = self.head
        if head is not None and document.hash == head.hash:
            return  # a repetition
        is_rival = document.prev_hash is not None and document.prev_hash in self._superseded
        if document in self.documents or not (is_rival or document.prev_hash == (head and head.hash)):
            refuse("the document does not succeed the newest one", "document_not_linked")
        if head is not None:
            self._check_methods(document)
        if is_rival:
            self.documents += (document,)
            self.conflict = f"two documents succeed {document.prev_hash}"
            return
        after = under_document(self.keys, document, introduced_by=packet_id)
        skew = self.rules.clock_skew_seconds
        if not any(key.may(Use.PACKET) and not key.is_over(at, skew) for key in after.values()):
            # Accepting it would disable the DID permanently: no later packet could correct it.
            refuse("the document leaves no key that may sign", "document_without_keys")
        self._become_head(document, introduced_by=packet_id)

    def _check_methods(self, document: DidDocument) -> None:
        """Refuse a successor that lists a key unknown to the chain, or under another id: only KEY_EVENTs
        introduce keys (A-021)."""
        for method in document.methods:
            key = self.keys.get(method.public_key)
            if key is None or key.key_id != method.key_id:
                refuse("the document lists a key that no event has introduced", "document_key_unknown")

    def _become_head(self, document: DidDocument, *, introduced_by: str | None) -> None:
        self.keys = under_document(self.keys, document, introduced_by=introduced_by)
        self.documents += (document,)
        if document.prev_hash is not None:
            self._superseded |= {document.prev_hash}


def conflict_refusal() -> InvalidPacket:
    """The error for any signature while the documents of a DID conflict, for the caller to raise (R-054)."""
    return refused("the author's documents are in conflict", "document_conflict")


def _require_begun(signer: KeyState, at: int) -> None:
    """Refuse a configured key whose window has not begun; the clock skew does not count here (R-070)."""
    if signer.introduced_by is None and at < signer.valid_from:
        raise InvalidPacket(ErrorCode.KEY_NOT_YET_VALID, "the signing key is not valid yet")


def _policy_refusal(reason: str, detail: str) -> InvalidPacket:
    return InvalidPacket(ErrorCode.POLICY_REJECTED, reason, detail=detail)
