"""Chains against a second, slow implementation of the rules that shares no code with the first.

The model has numbered keys instead of public keys, and records who signed a packet instead of signatures. It
stores only what was accepted, and replays the history second by second for each question.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strata.protocol.documents import DidDocument, RecoveryPolicy
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyChain, KeyRules
from strata.protocol.packets import Packet

from tests.support.alice import (
    ALICE,
    add,
    approve,
    chain,
    document,
    key,
    key_id,
    method,
    post,
    publish,
    revoke,
    rotate,
    sign,
)

SKEW, DELAY = 2, 4
START, END = 1000, 1012
RULES = KeyRules(clock_skew_seconds=SKEW, recovery_delay_seconds=DELAY)
SIGNING, RECOVERY = range(5), (11, 12, 13)


@dataclass(frozen=True)
class Said:
    """The content of an identity packet."""

    kind: str
    by: int
    key: int = 0
    replaces: int | None = None
    at: int = 0
    until: int | None = None
    target: Said | None = None
    document: str = ""


@cache
def packet_of(said: Said) -> Packet:
    match said.kind:
        case "ADD":
            return add(said.by, said.key, valid_from=said.at, valid_until=said.until)
        case "ROTATE":
            assert said.replaces is not None
            return rotate(said.by, said.replaces, said.key, valid_from=said.at)
        case "REVOKE":
            return revoke(said.by, said.key, revoked_at=said.at)
        case "APPROVE":
            assert said.target is not None
            return approve(said.by, packet_of(said.target))
        case "DOCUMENT":
            return publish(said.by, DOCUMENTS[said.document])
    return sign(said.by, {"type": "KEY_EVENT", "event": said.kind, "key_id": key_id(said.key)})


# name: predecessor, keys that may sign, keys that are listed without a role, recovery keys, threshold
SHAPES: dict[str, tuple[str | None, set[int], set[int], set[int], int | None]] = {
    "first": (None, {0}, set(), {11, 12, 13}, 2),
    "another first": (None, {0, 1}, set(), {11}, None),
    "narrow": ("first", {0}, {1}, {11, 12}, 1),
    "rival": ("first", {0}, set(), {11, 12, 13}, 3),
    "impossible": ("narrow", {0}, set(), {11}, 2),
}
DOCUMENTS: dict[str, DidDocument] = {}
for name, (before, may, listed, recovering, threshold) in SHAPES.items():
    DOCUMENTS[name] = document(
        *(method(n, valid_from=0) for n in sorted(may | listed)),
        *(method(n, valid_from=0, recovery=True) for n in sorted(recovering)),
        previous=DOCUMENTS[before] if before else None,
        assertion=[key_id(n) for n in sorted(may)],
        recovery_policy=None if threshold is None else RecoveryPolicy(threshold),
        extra={"name": name},
    )


def known_key(begins: int, until: int | None = None, *, signs: bool = True) -> dict[str, Any]:
    return {"from": begins, "until": until, "revoked": None, "recovery": False, "signs": signs, "known": True}


class Moment:
    """The model's state at one moment."""

    def __init__(self) -> None:
        self.keys = {0: known_key(0)}
        self.documents: list[str] = []
        self.conflict = False
        self.pending: dict[Said, tuple[int, set[int]]] = {}
        self.approvable: set[Said] = set()

    def copy(self) -> Moment:
        twin = Moment()
        twin.keys = {n: dict(k) for n, k in self.keys.items()}
        twin.documents = list(self.documents)
        twin.conflict = self.conflict
        twin.pending = {said: (due, set(approving)) for said, (due, approving) in self.pending.items()}
        twin.approvable = set(self.approvable)
        return twin

    def stands(self, n: int, at: int) -> bool:
        k = self.keys[n]
        return (
            at >= k["from"] - SKEW
            and (k["until"] is None or at <= k["until"] + SKEW)
            and (k["revoked"] is None or at <= k["revoked"])
        )

    def signers(self, at: int) -> set[int]:
        if self.conflict:
            return set()
        return {n for n, k in self.keys.items() if k["signs"] and not k["recovery"] and self.stands(n, at)}

    def agreeing(self, at: int) -> set[int]:
        return {
            n for n, k in self.keys.items() if k["recovery"] and (k["revoked"] is None or at <= k["revoked"])
        }

    def threshold(self) -> int | None:
        return SHAPES[self.documents[-1]][4] if self.documents else None

    def policy_works(self, at: int) -> bool:
        threshold = self.threshold()
        return threshold is None or threshold <= len(self.agreeing(at))

    def names(self, said: Said) -> set[int]:
        if said.kind != "ROTATE":
            return {said.key}
        assert said.replaces is not None
        return {said.key, said.replaces}

    def can_be_named(self, said: Said) -> bool:
        if said.kind == "REVOKE":
            return said.key in self.keys
        if said.kind == "ADD":
            return said.key not in self.keys
        if said.kind == "ROTATE":
            return said.key not in self.keys and said.replaces in self.keys
        return True

    def apply(self, said: Said) -> None:
        if said.kind == "REVOKE":
            k = self.keys[said.key]
            k["revoked"] = said.at if k["revoked"] is None else min(k["revoked"], said.at)
        if said.kind in ("ADD", "ROTATE"):
            signs = True
            if said.kind == "ROTATE":
                assert said.replaces is not None
                old = self.keys[said.replaces]
                old["until"] = said.at if old["until"] is None else min(old["until"], said.at)
                signs = old["signs"] or old["recovery"]
            self.keys[said.key] = known_key(said.at, said.until, signs=signs) | {"known": False}

    def fall_due(self, at: int) -> None:
        for said, (due, approving) in sorted(
            self.pending.items(), key=lambda item: (item[1][0], packet_of(item[0]).packet_id)
        ):
            agreeing = self.agreeing(at)
            if due > at or said.by not in agreeing or not self.policy_works(at):
                continue
            threshold = self.threshold()
            if threshold is not None and len(agreeing & approving) < threshold:
                continue
            del self.pending[said]
            if self.can_be_named(said):
                self.apply(said)
            else:
                self.approvable.discard(said)

    def take(self, said: Said, at: int) -> bool:
        """Return whether the packet holds; if so, apply it."""
        if self.conflict or said.by not in self.keys or not self.stands(said.by, at):
            return False
        signer = self.keys[said.by]
        if not signer["recovery"] and not signer["signs"]:
            return False
        if said.kind == "DOCUMENT":
            return not signer["recovery"] and self._take_document(said.document, at)
        if said.kind == "APPROVE":
            if not signer["recovery"] or not self.policy_works(at) or said.target not in self.approvable:
                return False
            if said.target in self.pending:
                self.pending[said.target][1].add(said.by)
            return True
        if signer["known"] and at < signer["from"]:
            return False
        if signer["recovery"]:
            if not self.policy_works(at) or not self.can_be_named(said):
                return False
            self.approvable.add(said)
            if said.kind != "FREEZE":
                self.pending[said] = (at + DELAY, {said.by})
            return True
        stopped = [p for p in self.pending if said.kind != "FREEZE" and self.names(p) & self.names(said)]
        veto = said.kind == "REVOKE" and stopped and said.key not in self.keys
        if not veto and not self.can_be_named(said):
            return False
        for p in stopped:
            del self.pending[p]
            self.approvable.discard(p)
        self.approvable.add(said)
        if not veto:
            self.apply(said)
        return True

    def _take_document(self, name: str, at: int) -> bool:
        before, may, listed, recovering, _ = SHAPES[name]
        head = self.documents[-1] if self.documents else None
        if name == head:
            return True
        if name in self.documents:
            return False
        rival = before is not None and before in self.documents[:-1]
        if before != head and not rival:
            return False
        if head is not None and not (may | listed | recovering) <= set(self.keys):
            return False
        if rival:
            self.conflict = True
            return True
        keys = self.copy().keys
        for n, k in keys.items():
            k["signs"], k["recovery"] = n in may, n in recovering
        for n in may | listed | recovering:
            if n not in keys:
                keys[n] = known_key(0, signs=n in may) | {"recovery": n in recovering, "known": False}
        if not any(
            k["signs"]
            and not k["recovery"]
            and (k["until"] is None or at <= k["until"] + SKEW)
            and (k["revoked"] is None or at <= k["revoked"])
            for k in keys.values()
        ):
            return False
        self.keys = keys
        self.documents.append(name)
        return True


class Model:
    """A relay or reader that does not care how long it takes."""

    def __init__(self) -> None:
        self.accepted: list[tuple[Said, int]] = []

    def through(
        self, at: int, extra: tuple[Said, int] | None = None
    ) -> tuple[Moment, set[Said], list[Moment]]:
        """The state at the end of `at`, what holds by then, and every state within that last second."""
        now, holding, within = Moment(), set(), []
        for second in range(START - 1, at + 1):
            now.fall_due(second)
            within = [now.copy()]
            waiting = [s for s, t in [*self.accepted, *([extra] if extra else [])] if t == second]
            waiting.sort(key=lambda said: (said.kind != "DOCUMENT", packet_of(said).packet_id))
            while waiting:
                for said in waiting:
                    trial = now.copy()
                    if trial.take(said, second):
                        now = trial
                        now.fall_due(second)
                        holding.add(said)
                        waiting.remove(said)
                        within.append(now.copy())
                        break
                else:
                    break
        return now, holding, within

    def offer(self, said: Said, at: int) -> bool:
        if any(said == known for known, _ in self.accepted) and said in self.through(at)[1]:
            return True
        if not self.through(at)[0].take(said, at):
            return False
        if said not in self.through(at, (said, at))[1]:
            return False
        self.accepted.append((said, at))
        return True


def saying(kind: str, by: Any, **members: Any) -> Any:
    return st.builds(Said, st.just(kind), by, **members)


ANYBODY = st.sampled_from([*SIGNING, *RECOVERY, 30])
WHEN = st.integers(START - 2, END)
TARGETS = st.one_of(
    saying(
        "ROTATE",
        st.sampled_from(RECOVERY),
        key=st.sampled_from([1, 2]),
        replaces=st.sampled_from([0, 1]),
        at=st.just(START),
    ),
    saying("ADD", st.sampled_from(RECOVERY), key=st.sampled_from([1, 3]), at=st.just(START)),
    saying("REVOKE", st.sampled_from(RECOVERY), key=st.sampled_from([0, 12]), at=st.just(START + 3)),
)
SAYINGS = st.one_of(
    TARGETS,
    saying(
        "ADD",
        ANYBODY,
        key=st.sampled_from(SIGNING),
        at=WHEN,
        until=st.none() | st.integers(END, END + 2),
    ),
    saying(
        "ROTATE", ANYBODY, key=st.sampled_from(SIGNING), replaces=st.sampled_from([*SIGNING, 12]), at=WHEN
    ),
    saying("REVOKE", ANYBODY, key=st.sampled_from([*SIGNING, *RECOVERY]), at=WHEN),
    saying("FREEZE", ANYBODY),
    saying("APPROVE", ANYBODY, target=TARGETS),
    saying("DOCUMENT", ANYBODY, document=st.sampled_from(list(SHAPES))),
)
HISTORIES = st.lists(st.tuples(SAYINGS, st.integers(START, END)), max_size=12)
PROLOGUES = st.sampled_from([(), ("first",), ("another first",)])


def offer(made: KeyChain, said: Said, at: int) -> tuple[KeyChain, bool]:
    packet = packet_of(said)
    try:
        made.verify(packet, at)
        verified = True
    except InvalidPacket:
        verified = False
    try:
        return made.apply(packet, at), True
    except InvalidPacket:
        assert not verified or any(t == at for _, t in made.events), "verify and apply differ"
        return made, False


@pytest.mark.req("R-061", "R-062", "R-067", "R-068", "R-070", "R-072", "R-074", "R-076", "R-079", "R-080")
@pytest.mark.req("R-053", "R-054", "R-081", "R-082", "R-083", "R-084", "R-085", "R-086", "R-087", "R-088")
@settings(max_examples=200, deadline=None, phases=set(Phase) - {Phase.explain})
@given(PROLOGUES, HISTORIES)
def test_chains_agree_with_the_model(prologue, history):
    model, made = Model(), chain(rules=RULES)
    for name in prologue:
        said = Said("DOCUMENT", 0, document=name)
        assert model.offer(said, START - 1)
        made, accepted = offer(made, said, START - 1)
        assert accepted
    for said, at in sorted(history, key=lambda one: one[1]):
        made, accepted = offer(made, said, at)
        assert accepted == model.offer(said, at), (said, at)

    _, holding, _ = model.through(END)
    assert {packet.packet_id for packet, _ in made.events} == {packet_of(said).packet_id for said in holding}
    for at in (*range(START - 3, END + 4), END + DELAY, END + DELAY + 1):
        compare_at(made, model, at)
    replayed = KeyChain.replay(ALICE, [(packet_of(said), at) for said, at in model.accepted], rules=RULES)
    assert replayed.events == made.events
    assert replayed.keys(END + DELAY) == made.keys(END + DELAY)


def compare_at(made: KeyChain, model: Model, at: int) -> None:
    last = max((t for _, t in model.accepted), default=START - 1)
    now, _, _ = model.through(max(at, last))
    _, _, within = model.through(at)
    assert bool(made.conflict) == now.conflict
    assert {n for n in range(32) if key(n).public_key in made.candidates(at)} == now.signers(at)
    for said, _ in model.accepted:
        assert made.is_pending(packet_of(said).packet_id, at) == (said in now.pending), (said, at)
    for n in SIGNING:
        expected = any(n in moment.signers(at) for moment in within) or (at < START - 1 and n == 0)
        try:
            made.verify(post(n), at, ingest=False)
        except InvalidPacket as refusal:
            assert not expected, (n, at, refusal)
        else:
            assert expected, (n, at)
