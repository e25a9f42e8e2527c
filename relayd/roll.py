"""The roll call: which sessions are open in all processes.

Each process knows only its own sessions. The asker sends a question to all processes, and each answers with
those of its sessions that match, in parts small enough for a notification. Neither questions nor answers are
stored. How both travel is in `relayd.store.roll`.

A session's id names its process and its number there. Numbers rise, and no process reuses the name of one
that has ended, so an id never comes to mean another session, and paging by id misses no session that was open
before.
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
    "AnswerPart",
    "Answers",
    "OpenSession",
    "Question",
    "Roll",
    "SessionSelection",
    "is_session_id",
    "parts_of",
    "session_id",
]

MAX_SESSIONS: Final = 200
"""The largest number of sessions in one page."""
_PART_BYTES: Final = 7000
"""The bytes for sessions of a notification's 8,000; the rest is for the part's own members."""
_LONGEST: Final = 1024
"""The most characters of a DID or a network in a question: a question must fit into a notification."""
_ID: Final = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,15})")


class OpenSession(msgspec.Struct, frozen=True):
    """One open session."""

    id: str
    opened_at: int
    address: str | None
    identity: str | None
    """The DID that it has authenticated as."""
    subscriptions: int
    publishes: int
    events: int
    """Events sent to it so far."""
    held_bytes: int
    """The memory held for it, approximately."""


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which sessions are wanted: at most `limit`, after the id `after`, that meet all given conditions."""

    limit: int = MAX_SESSIONS
    after: str | None = None
    session: str | None = None
    """The id of the only session wanted."""
    identity: str | None = None
    network: str | None = None
    reply: str = ""
    """The channel for the answers."""
    of: tuple[str, ...] = ()
    """The processes that must answer."""

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


class SessionSelection:
    """Takes the sessions of a process one by one, and keeps those that match a question."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._after = None if question.after is None else _place_of(question.after)
        self._network = None if question.network is None else parse_network(question.network)
        self._found: list[OpenSession] = []
        self.total = 0
        """The number of sessions looked at."""

    def add(self, session: OpenSession) -> None:
        """Look at a session."""
        self.total += 1
        if self._wants(session):
            self._found.append(session)

    def page(self) -> list[OpenSession]:
        """The matching sessions, in order, up to the limit."""
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


class AnswerPart(msgspec.Struct, frozen=True, array_like=True):
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
    """The id to continue from; None if this is the last page."""
    total: int
    """The number of sessions open in the processes that have answered, wanted or not."""
    silent: int
    """The number of processes that have not answered in time."""


@dataclass(slots=True)
class Answers:
    """Assembles the parts as they arrive; those of one process arrive in order."""

    question: Question
    present: frozenset[str]
    """The processes that are running."""
    _sessions: list[OpenSession] = field(default_factory=list)
    _totals: dict[str, int] = field(default_factory=dict)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The running processes that may hold what is wanted and have not answered yet."""
        session = self.question.session
        may_know = self.present if session is None else self.present & {session[:8]}
        return tuple(sorted(may_know - self._totals.keys()))

    def receive(self, payload: str) -> None:
        """Take a notification; it changes nothing if it is not part of an answer, or of a second one."""
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
        """The result so far."""
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
    """A process's answer, as the payloads of notifications."""
    piece: list[OpenSession] = []
    size = 0
    for session in sessions:
        encoded = len(_ENCODER.encode(session)) + 1
        if piece and size + encoded > _PART_BYTES:
            yield _ENCODER.encode(AnswerPart(process, total, False, piece))
            piece, size = [], 0
        piece.append(session)
        size += encoded
    yield _ENCODER.encode(AnswerPart(process, total, True, piece))


def is_session_id(text: str) -> bool:
    """Whether this text has the form of a session's id."""
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
_DECODER: Final = msgspec.json.Decoder(AnswerPart)
