"""Which sessions are open, asked of every process at once.

Each process knows its own sessions and no others. Whoever wants to know asks all of them, and each says which
of its sessions are wanted, in parts as small as a notification has to be. Nothing of it is kept: neither
question nor answer is written down. How both travel is in `relayd.store.roll`.

A session's id names its process and its number there. Numbers rise, and no process takes the name of another
that has gone, so an id never comes to mean another session, and pages by id miss nobody who was there before.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
from strata.protocol.ids import is_did

from relayd.addresses import Network, parse_address, parse_network

__all__ = [
    "MAX_SESSIONS",
    "Answers",
    "OpenSession",
    "Part",
    "Question",
    "Roll",
    "Selection",
    "is_session_id",
    "parts_of",
    "session_id",
]

MAX_SESSIONS: Final = 200
"""Most sessions of one page."""
_PART_BYTES: Final = 7000
"""Of a notification's 8,000; the rest is for the part's own members."""
_LONGEST: Final = 1024
"""Characters of a DID or a network that is asked about: a question has to fit into a notification."""
_ID: Final = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,15})")


class OpenSession(msgspec.Struct, frozen=True):
    """One open session."""

    id: str
    opened_at: int
    address: str | None
    identity: str | None
    """The DID that it has proved to speak for."""
    subscriptions: int
    publishes: int
    events: int
    """Sent to it so far."""
    held_bytes: int
    """What is kept in memory for it, about."""


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which sessions are wanted: at most `limit`, from behind the id `after`, that meet all that is given."""

    limit: int = MAX_SESSIONS
    after: str | None = None
    session: str | None = None
    """An id: this one alone."""
    identity: str | None = None
    network: str | None = None
    reply: str = ""
    """Where the answer goes."""
    of: tuple[str, ...] = ()
    """The processes that are asked."""

    def __post_init__(self) -> None:
        for text in (self.after, self.session):
            if text is not None and not is_session_id(text):
                raise ValueError("not the id of a session")
        if not 1 <= self.limit <= MAX_SESSIONS:
            raise ValueError(f"limit is 1 to {MAX_SESSIONS}")
        if self.identity is not None and not (len(self.identity) <= _LONGEST and is_did(self.identity)):
            raise ValueError("not a DID")
        if self.network is not None:
            if len(self.network) > _LONGEST:
                raise ValueError("not a network")
            parse_network(self.network)


class Selection:
    """Takes the sessions of a process one by one, and keeps those that a question is about."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._after = None if question.after is None else _place_of(question.after)
        self._network = None if question.network is None else parse_network(question.network)
        self._found: list[OpenSession] = []
        self.total = 0
        """Those that were looked at."""

    def add(self, session: OpenSession) -> None:
        """Look at a session."""
        self.total += 1
        if self._wants(session):
            self._found.append(session)

    def page(self) -> list[OpenSession]:
        """What is wanted, in order."""
        return sorted(self._found, key=_place)[: self._question.limit]

    def _wants(self, session: OpenSession) -> bool:
        asked = self._question
        if asked.session is not None and session.id != asked.session:
            return False
        if asked.identity is not None and session.identity != asked.identity:
            return False
        if self._after is not None and _place(session) <= self._after:
            return False
        return self._network is None or _is_inside(session.address, self._network)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of one process's answer."""

    process: str
    total: int
    """Sessions open in that process."""
    is_last: bool
    sessions: list[OpenSession]


@dataclass(frozen=True, slots=True)
class Roll:
    """The sessions of all processes that have answered."""

    sessions: list[OpenSession]
    next: str | None
    """The id to go on from; None where this was all."""
    total: int
    """Sessions open in the processes that have answered, wanted or not."""
    silent: int
    """Processes that have not answered in time."""


@dataclass(slots=True)
class Answers:
    """Puts the parts together as they come; each process's come in order."""

    question: Question
    present: frozenset[str]
    """The processes that are there."""
    _sessions: list[OpenSession] = field(default_factory=list)
    _totals: dict[str, int] = field(default_factory=dict)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The processes that are there, may know, and have not answered."""
        session = self.question.session
        may_know = self.present if session is None else self.present & {session[:8]}
        return tuple(sorted(may_know - self._totals.keys()))

    def receive(self, payload: str) -> None:
        """Take a notification; what is no part of an answer, or of a second one, changes nothing."""
        try:
            part = _DECODER.decode(payload)
        except msgspec.MsgspecError:
            return
        if part.process in self._totals:
            return
        self._sessions += part.sessions
        if part.is_last:
            self._totals[part.process] = part.total

    def roll(self) -> Roll:
        """What has come so far."""
        found = sorted(self._sessions, key=_place)
        page = found[: self.question.limit]
        is_full = len(page) == self.question.limit
        return Roll(
            page,
            page[-1].id if is_full else None,
            sum(self._totals.values()),
            len(self.awaited),
        )


def parts_of(process: str, total: int, sessions: list[OpenSession]) -> Iterator[bytes]:
    """A process's answer in notifications."""
    piece: list[OpenSession] = []
    size = 0
    for session in sessions:
        encoded = len(_ENCODER.encode(session)) + 1
        if piece and size + encoded > _PART_BYTES:
            yield _ENCODER.encode(Part(process, total, False, piece))
            piece, size = [], 0
        piece.append(session)
        size += encoded
    yield _ENCODER.encode(Part(process, total, True, piece))


def is_session_id(text: str) -> bool:
    """Whether a session can have this id."""
    return _ID.fullmatch(text) is not None


def session_id(process: str, number: int) -> str:
    """The id of a session."""
    return f"{process}-{number}"


def _is_inside(text: str | None, network: Network) -> bool:
    address = None if text is None else parse_address(text)
    return address is not None and address.version == network.version and address in network


def _place(session: OpenSession) -> tuple[str, int]:
    return _place_of(session.id)


def _place_of(text: str) -> tuple[str, int]:
    process, _, number = text.partition("-")
    return process, int(number)


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Part)
