"""Random key chains of one author, and the verdicts of Python on them at many moments."""

from __future__ import annotations

import random
from typing import Any

from strata.protocol.documents import DidDocument
from strata.protocol.keys import KeyChain, Use
from strata.protocol.packets import Packet

from tests.support import alice
from tests.web.verdicts import verdict

__all__ = ["key_chains"]

T = alice.T


class Worlds:
    """Random chains of one author's identity packets, with their expected verdicts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.packets: dict[str, int] = {}

    def named(self, packet: Packet) -> int:
        return self.packets.setdefault(packet.canonical.decode(), len(self.packets))

    def world(self) -> dict[str, object]:
        """Some packets, sound and unsound, and the verdicts on every key at many moments."""
        draw = self.random
        documents: list[DidDocument] = []
        if draw.random() < 0.5:
            documents.append(
                draw.choice([alice.with_recovery(2), alice.with_recovery(1, 1), alice.with_recovery(None)])
            )
            if draw.random() < 0.3:
                documents.append(self._successor(documents[0]))
        known = documents if draw.random() < 0.5 else []
        events: list[tuple[Packet, int]] = (
            [] if known else [(alice.publish(0, d), alice.T - 50) for d in documents]
        )
        at = alice.T
        for _ in range(draw.randrange(2, 8)):
            at += draw.choice((0, 0, 1, 100, 400, alice.DAY))
            events.append((self._statement(events, documents), at))
        if documents and draw.random() < 0.5:  # a recovery key's event takes effect by agreement, and late
            event = draw.choice((alice.add(11, 4), alice.rotate(11, 0, 4), alice.revoke(11, 0)))
            agreed = [alice.approve(by, event) for by in draw.choice(((), (12,), (12, 13), (11,), (0,)))]
            events += [(packet, at + step) for step, packet in enumerate([event, *agreed])]
            at += draw.choice((5, alice.DAY - 1, alice.DAY, alice.DAY + 5))
            events.append((draw.choice((alice.revoke(12, 12), alice.revoke(0, 4), alice.add(4, 3))), at))
        if documents and draw.random() < 0.3:  # rival documents, after which no key resolves
            for created_at in (alice.T + 7, alice.T + 8):
                at += 1
                events.append((alice.publish(0, self._rival(documents[0], created_at)), at))
        return self._judged(known, events, at)

    def recovery(self) -> dict[str, object]:
        """An event by a recovery key, with or without approvals and a veto, before and after its time."""
        draw = self.random
        known = [alice.with_recovery(draw.choice((1, 1, 2, 3)))]
        event = draw.choice((alice.add(11, 4), alice.add(11, 4), alice.rotate(11, 0, 4), alice.revoke(11, 0)))
        agreed = [alice.approve(by, event) for by in draw.sample((11, 12, 13), draw.randrange(4))]
        events = [(packet, alice.T + step) for step, packet in enumerate([event, *agreed])]
        at = alice.T + draw.choice((10, 10, alice.DAY - 5, alice.DAY, alice.DAY + 5))
        if draw.random() < 0.5:
            events.append((draw.choice((alice.revoke(0, 4), alice.revoke(0, 4), alice.revoke(12, 12))), at))
        return self._judged(known, events, at)

    def window(self) -> dict[str, object]:
        """One key with an end, or with a beginning in the future; its edges come after the last packet."""
        begins = alice.T + self.random.choice((0, 1000, alice.DAY))
        until = self.random.choice((None, begins, begins + 500))
        added = alice.add(0, 1, valid_from=begins, valid_until=until)
        revoked = alice.revoke(0, 1, revoked_at=begins + 700)
        return self._judged(
            [], [(added, alice.T), (revoked, alice.T + 1)][: self.random.randrange(1, 3)], alice.T
        )

    def _judged(
        self, known: list[DidDocument], events: list[tuple[Packet, int]], at: int
    ) -> dict[str, object]:
        draw = self.random
        order = events[:]
        draw.shuffle(order)
        chain = KeyChain.replay(alice.ALICE, order, documents=known, rules=alice.RULES)
        return {
            "documents": [document.canonical.decode() for document in known],
            "events": [[self.named(packet), received_at] for packet, received_at in order],
            "held": [packet.packet_id for packet, _ in chain.events],
            "conflict": chain.conflict is not None,
            "keys": self._keys(chain, at),
            "edges": self._edges(chain, at),
            "verdicts": self._verdicts(chain, events, at),
        }

    def _successor(self, document: DidDocument) -> DidDocument:
        listed = [alice.method(0), *(m for m in document.methods if m.recovery)][
            : self.random.randrange(1, 5)
        ]
        created = alice.T + self.random.randrange(3)
        return alice.document(
            *listed, previous=document, created_at=created, recovery_policy=document.recovery_policy
        )

    def _rival(self, document: DidDocument, created_at: int) -> DidDocument:
        return alice.document(alice.method(0), previous=document, created_at=created_at)

    def _statement(self, events: list[tuple[Packet, int]], documents: list[DidDocument]) -> Packet:
        draw = self.random
        by = draw.choice((0, 0, 0, 1, 2, 3, 11, 12))
        kind = draw.choice(("add", "add", "rotate", "revoke", "revoke", "approve", "document", "other"))
        moment = alice.T + draw.choice((-alice.DAY, -10, 0, 5, 500, alice.DAY))
        if kind == "add":
            until = draw.choice((None, None, moment + 500))
            return alice.add(by, draw.randrange(1, 5), valid_from=moment, valid_until=until)
        if kind == "rotate":
            return alice.rotate(by, draw.randrange(0, 4), draw.randrange(1, 5), valid_from=moment)
        if kind == "approve" and events:
            return alice.approve(by, draw.choice(events)[0])
        if kind == "document" and documents:
            return alice.publish(by, self._successor(draw.choice(documents)))
        if kind == "other":
            return alice.sign(by, draw.choice(ODD_CONTENTS))
        return alice.revoke(by, draw.choice((0, 1, 2, 3, 11)), revoked_at=moment)

    def _keys(self, chain: KeyChain, last: int) -> list[dict[str, object]]:
        return [
            {
                "at": at,
                "packet": [key.hex() for key in chain.candidates(at)],
                "auth": [key.hex() for key in chain.candidates(at, Use.AUTH)],
                "states": [
                    [key.key_id, key.valid_from, key.valid_until, key.revoked_at, key.recovery]
                    for key in chain.keys(at)
                ],
            }
            for at in (alice.T, last, last + 1, last + 1000, last + 3 * alice.DAY)
        ]

    def _edges(self, chain: KeyChain, last: int) -> list[list[object]]:
        """The keys that may sign on either side of every edge of a window."""
        edges = {edge for key in chain.keys(last) for edge in key.edges(alice.SKEW)}
        moments = sorted({moment for edge in edges for moment in (edge - 1, edge) if moment > last})
        return [[at, [key.hex() for key in chain.candidates(at)]] for at in moments]

    def _verdicts(
        self, chain: KeyChain, events: list[tuple[Packet, int]], last: int
    ) -> list[dict[str, object]]:
        found = []
        moments = sorted(
            {at + step for _, at in events for step in (0, 1)} | {alice.T - 1000, last + 2 * alice.DAY}
        )
        asked = [alice.post(n) for n in (0, 1, 2, 4, 11)] + [packet for packet, _ in events[-4:]]
        for packet in asked:
            for at in self.random.sample(moments, min(3, len(moments))):
                for ingest in (True, False):
                    said = verdict(chain.verify, packet, at, ingest=ingest)
                    found.append({"packet": self.named(packet), "at": at, "ingest": ingest} | said)
        return found


ODD_CONTENTS: list[dict[str, Any]] = [
    {"type": "KEY_EVENT", "event": "PAUSE", "key_id": alice.key_id(0)},
    {"type": "KEY_EVENT", "event": "ADD", "key_id": alice.key_id(4)},
    {"type": "KEY_EVENT", "event": "REVOKE", "key_id": "did:strata:other#k", "revoked_at": T},
    {"type": "RECOVERY_APPROVAL", "target_event": "0x00", "approved_at": T},
    {"type": "DID_DOCUMENT", "document": {"id": alice.ALICE}},
    {"type": "DID_DOCUMENT"},
]


def key_chains() -> object:
    """Key chains at many moments."""
    worlds = Worlds(20261122)
    made = [
        make()
        for make in (worlds.world, worlds.world, worlds.recovery, worlds.recovery, worlds.window)
        for _ in range(8)
    ]
    return {
        "did": alice.ALICE,
        "clock_skew_seconds": alice.RULES.clock_skew_seconds,
        "recovery_delay_seconds": alice.RULES.recovery_delay_seconds,
        "packets": list(worlds.packets),
        "worlds": made,
    }
